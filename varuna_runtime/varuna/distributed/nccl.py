"""Sums of gradients over NCCL, where each rank has a CUDA device of its own.

gloo copies gradients through host memory; NCCL takes them from device to device, but refuses two ranks on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from varuna.distributed.gloo import NEVER, GlooGroup, Work, keep_alive_forever
from varuna.distributed.groups import RankGroup

__all__ = ["NcclGroup", "abort_group", "connect_nccl", "have_own_devices"]

_POLL_S = 0.0005
"""How often a wait checks whether the device is done. NCCL wakes no thread; a collective takes milliseconds."""


class _DeviceWork(Work, Protocol):
    def is_completed(self) -> bool: ...


def have_own_devices(devices: Sequence[str]) -> bool:
    """Whether ranks with devices of these names can use NCCL together. The same answer on all of them."""
    return all(devices) and len(set(devices)) == len(devices)


def connect_nccl(store: Store, rank: int, size: int) -> GlooGroup:
    """The NCCL group of the ranks that share `store`. They connect at its first collective, not before."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = NEVER
    group = nccl(store, rank, size, options)
    keep_alive_forever(group)
    return cast(GlooGroup, group)  # it has all of that but send and recv by tag


def abort_group(group: object, within_s: float) -> bool:
    """Ends the group's kernels on the device. Aborting has a history of hangs: False when this one takes too long."""
    abort = threading.Thread(target=cast(Any, group).abort, name="varuna-nccl-abort", daemon=True)
    abort.start()
    abort.join(within_s)
    return not abort.is_alive()


class NcclGroup(RankGroup):
    """Collectives among ranks that each have a device of their own.

    A dead peer leaves NCCL's kernel running on the device for ever, and not every link of NCCL's reports it, but
    `RankPresence` does. So a wait never blocks in the device but polls, and may be left. If the process then ends, the
    driver ends what runs on the device for it; one that goes on aborts the communicator (`abort_group`).
    """

    def _start(self, operations: Sequence[Callable[[], Work]]) -> Callable[[], None]:
        self._departure.raise_if_leaving()
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
