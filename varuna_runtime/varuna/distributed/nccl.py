"""Sums of gradients over NCCL, where each rank has a CUDA device of its own, and messages where the script asks for it.

gloo copies tensors through host memory; NCCL takes them from device to device, but refuses two ranks on one device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import psutil
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from varuna.distributed.gloo import NEVER, GlooGroup, Work, keep_alive_forever
from varuna.distributed.groups import RankGroup

__all__ = ["POLL_S", "DeviceWork", "NcclGroup", "NcclPair", "abort_group", "connect_nccl", "have_own_devices"]

POLL_S = 0.0005
"""How often a wait checks whether the device is done. NCCL wakes no thread; a collective takes milliseconds."""


_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What torch's NCCL binding reads when a group is made. By default a thread of its own ends the process with SIGABRT
when a peer is gone: the worker would seem to have been killed, and its state would be lost. Here a wait raises instead.
"""

_INTERFACE = "NCCL_SOCKET_IFNAME"


class DeviceWork(Work, Protocol):
    """An operation on a device. Once it is completed, `wait` returns at once, or raises RuntimeError when it failed; it
    orders the current stream of the device behind the operation."""

    def is_completed(self) -> bool: ...


def have_own_devices(devices: Sequence[str]) -> bool:
    """Whether ranks with devices of these names can use NCCL together. The same answer on all of them."""
    return all(devices) and len(set(devices)) == len(devices)


def connect_nccl(store: Store, rank: int, size: int, *, address: str) -> GlooGroup:
    """The NCCL group of the ranks that share `store`. They connect at its first collective, not before.

    NCCL uses the network interface that has `address`, unless the user has named another one for it.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = NEVER
    interface = _find_interface(address)
    if interface:
        os.environ.setdefault(_INTERFACE, f"={interface}")  # read at the first collective of the process
    with _settings():
        group = nccl(store, rank, size, options)
    keep_alive_forever(group)
    return cast(GlooGroup, group)  # it has all of that, but its send and recv ignore tags


@contextmanager
def _settings() -> Iterator[None]:
    """In the block; groups of the script's own keep the user's."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _find_interface(address: str) -> str:
    """The name of the network interface with this address; "" for none."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(each.address == address for each in addresses)), "")


def abort_group(group: object, within_s: float) -> bool:
    """Ends the group's kernels on the device. Aborting has a history of hangs: False when this one takes too long."""
    abort = threading.Thread(target=cast(Any, group).abort, name="varuna-nccl-abort", daemon=True)
    abort.start()
    abort.join(within_s)
    return not abort.is_alive()


class NcclPair:
    """One way between two ranks that each have a device of their own. Tensors arrive in the order in which they go.

    Operations begin after what the current stream has now, and run beside it. The first one connects the two ranks, and
    may block until the other rank has called it.
    """

    def __init__(self, group: GlooGroup, peer_in_group: int) -> None:
        """`group`: of `connect_nccl`."""
        self._group = group
        self._peer_in_group = peer_in_group

    def start_sending(self, tensor: Tensor) -> DeviceWork:
        """The tensor is contiguous, and stays as it is until the work is completed."""
        return cast(DeviceWork, self._group.send([tensor], self._peer_in_group, 0))

    def start_receiving(self, tensor: Tensor) -> DeviceWork:
        return cast(DeviceWork, self._group.recv([tensor], self._peer_in_group, 0))


class NcclGroup(RankGroup):
    """Collectives among ranks that each have a device of their own.

    A dead peer leaves NCCL's kernel running on the device for ever, and not every link of NCCL's reports it, but
    `RankPresence` does. So a wait never blocks in the device but polls, and may be left. If the process then ends, the
    driver ends what runs on the device for it; one that goes on aborts the communicator (`abort_group`).
    """

    def _start(self, operations: Sequence[Callable[[], Work]]) -> Callable[[], None]:
        self._departure.raise_if_leaving()
        try:
            works = [cast(DeviceWork, operation()) for operation in operations]
        except RuntimeError as error:
            self._lost(error)
            raise

        def wait() -> None:
            self._departure.wait_until(lambda: all(work.is_completed() for work in works), lambda: POLL_S)
            try:
                for work in works:
                    work.wait(NEVER)  # on the host at once; orders the current stream behind NCCL's
            except RuntimeError as error:
                self._lost(error)
                raise

        return wait
