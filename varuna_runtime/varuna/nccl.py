"""Sums of gradients over NCCL, where each rank has a CUDA device of its own.

gloo copies gradients through host memory; NCCL takes them from device to device, but refuses two ranks on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from varuna._gloo import NEVER, GlooGroup, Work, keep_for_ever
from varuna.launch import Group

__all__ = ["NcclGroup", "connect_nccl", "device_name", "each_its_own"]

_POLL_S = 0.0005
"""How often a wait looks whether the device is through. Nothing of NCCL's wakes it; a collective takes milliseconds."""


class _DeviceWork(Work, Protocol):
    def is_completed(self) -> bool: ...


def device_name(device: torch.device) -> str:
    """What no other device anywhere is called; "" for one that NCCL cannot use."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def each_its_own(devices: Sequence[str]) -> bool:
    """Whether ranks with devices of these names can use NCCL together. The same answer on all of them."""
    return all(devices) and len(set(devices)) == len(devices)


def connect_nccl(store: Store, rank: int, size: int) -> GlooGroup:
    """The NCCL group of those who share `store`. They meet at its first collective, not before."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = NEVER
    group = nccl(store, rank, size, options)
    keep_for_ever(group)
    return cast(GlooGroup, group)  # of which it has all but send and recv by tag


class NcclGroup(Group):
    """Collectives among ranks of which each has a device of its own.

    A dead peer leaves NCCL's kernel running on the device for ever, and not every link of NCCL's reports it: it is
    `Presence` that does. So a wait never blocks in the device but polls, and may be left. Then the process ends, and
    the driver ends what runs on the device for it; aborting the communicator first has a long history of hangs.
    """

    def _start(self, operations: Sequence[Callable[[], Work]]) -> Callable[[], None]:
        self._departure.check()
        try:
            works = [cast(_DeviceWork, operation()) for operation in operations]
        except RuntimeError as error:
            self._lost(error)
            raise

        def wait() -> None:
            self._departure.wait_until(lambda: all(work.is_completed() for work in works), lambda: _POLL_S)
            try:
                for work in works:
                    work.wait(NEVER)  # on the host at once; orders the current stream behind NCCL's
            except RuntimeError as error:
                self._lost(error)
                raise

        return wait
