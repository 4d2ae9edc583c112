"""NCCL's messages between two ranks, for devices that NCCL does not know: over gloo, with what matters of NCCL's ways.

An operation begins after what the current stream has at the call, runs on a stream of the group's own, and is completed
some time later. A lost peer never completes it: only `abort` ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

import varuna.assembly.connections
from varuna.devices.accelerator import record_event, use_stream, wait_for_event
from varuna.distributed.gloo import NEVER, GlooGroup, connect_group
from varuna.distributed.group_sockets import list_sockets, shut_down_sockets
from waiting import DEADLINE_S

__all__ = ["EmulatedNccl", "emulate_nccl"]


class EmulatedWork:
    def __init__(self) -> None:
        self._launched = threading.Event()
        self._ended: torch.Event | None = None

    def mark_launched(self, ended: torch.Event) -> None:
        """The operation has been launched to its end. Who sees it comes after the thread that says so."""
        self._ended = ended
        self._launched.set()

    def is_completed(self) -> bool:
        return self._launched.is_set() and self._ended is not None and self._ended.query()

    def wait(self, _: timedelta) -> bool:
        assert self.is_completed(), "this would have blocked in the device"
        assert self._ended is not None
        torch.accelerator.current_stream(self._ended.device).wait_event(self._ended)
        return True


class EmulatedNccl:
    """What `connect_nccl` returns, as far as links use it."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self._stream: torch.Stream | None = None
        self.aborted = threading.Event()
        self._operations: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A daemon: a process can end while its peer, which will never send, is waited for.
        threading.Thread(target=self._run_all, daemon=True).start()

    def send(self, tensors: list[Tensor], peer: int, _: int) -> EmulatedWork:
        [tensor] = tensors
        stream, work = self._begin(tensor.device), EmulatedWork()
        with use_stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            copied = record_event(tensor.device)

        def run() -> None:
            wait_for_event(copied)
            self._group.send([host], peer, 0).wait(NEVER)
            work.mark_launched(copied)

        self._operations.put(run)
        return work

    def recv(self, tensors: list[Tensor], peer: int, _: int) -> EmulatedWork:
        [tensor] = tensors
        stream, work = self._begin(tensor.device), EmulatedWork()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

        def run() -> None:
            self._group.recv([host], peer, 0).wait(NEVER)
            with use_stream(stream):
                tensor.copy_(host, non_blocking=True)
                work.mark_launched(record_event(tensor.device))

        self._operations.put(run)
        return work

    def abort(self) -> None:
        self.aborted.set()

    def _run_all(self) -> None:
        try:
            while True:
                self._operations.get()()
        except RuntimeError:
            return  # the peer is lost

    def _begin(self, device: torch.device) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        return self._stream


def emulate_nccl(rank: int) -> None:
    """From now on this process takes its device for one of its own that NCCL knows, and has NCCL emulated."""

    def connect(store: Store, rank: int, size: int, *, address: str) -> EmulatedNccl:
        before = list_sockets()
        group = connect_group(store, rank, size, address=address, timeout=timedelta(seconds=DEADLINE_S))
        sockets, emulated = list_sockets() - before, EmulatedNccl(group)

        def end_when_aborted() -> None:
            emulated.aborted.wait()
            shut_down_sockets(sockets)

        threading.Thread(target=end_when_aborted, daemon=True).start()
        return emulated

    module: Any = varuna.assembly.connections
    module.connect_nccl = connect
    module.nccl_device_name = lambda device: f"{device} of rank {rank}"
