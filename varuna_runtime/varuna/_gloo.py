"""What Varuna uses of torch's gloo binding, with the types that torch's stubs leave out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, Store

__all__ = ["NEVER", "GlooGroup", "Work", "connect_group", "keep_for_ever"]

NEVER = timedelta(days=365)
"""The time limit inside gloo: a gloo wait that runs out destroys its group, so none ever may."""


class Future(Protocol):
    def then(self, callback: Callable[[Any], None], /) -> Any: ...


class Work(Protocol):
    """One asynchronous operation. Only a collective's future ever completes without a `wait` (torch 2.13)."""

    def wait(self, timeout: timedelta, /) -> bool: ...
    def get_future(self) -> Future: ...


class GlooGroup(Protocol):
    """A gloo process group; operations raise RuntimeError, or their work does, when a peer is gone."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> Work: ...
    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions, /) -> Work: ...


def keep_for_ever(group: object) -> None:
    """Keeps a process group alive until the process ends, with a reference that nobody gives back.

    Destroying one joins its threads, and at interpreter shutdown, when Python drops what is left, such a thread may be
    stopped for good at the interpreter's lock (`varuna.worker`): the join would never end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def connect_group(store: Store, rank: int, size: int, *, address: str, timeout: timedelta) -> GlooGroup:
    """Joins the group whose members share `store`, listening on this machine's `address`.

    Blocks until all members are there. Raises RuntimeError when they are not within `timeout`.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    group = gloo(store, rank, size, options)
    keep_for_ever(group)
    return cast(GlooGroup, group)


def record_event(timed: bool = False) -> torch.cuda.Event:
    """A CUDA event at the end of the work that the current stream has now."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event
