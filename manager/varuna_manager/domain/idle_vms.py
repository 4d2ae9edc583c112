"""Which VMs have nothing to do, and how many of them jobs have left over. For a fleet that follows the jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState

__all__ = ["continue_clocks", "count_enough_vms", "is_idle"]

_PATIENCE = 4.0
"""The first VM that jobs leave over waits for the others for at most this many times `spare_after_s`."""


def is_idle(vm: VmView, jobs: Mapping[str, Collection[str]], newcomers: Collection[str]) -> bool:
    """Whether the VM has no workers, and nothing there gets ready for any.

    Args:
        jobs: those that are not over, each with the VMs on which its setup has failed. Another attempt there, which is
            made again and again, keeps no VM.
        newcomers: jobs with processes there that were started ahead.
    """
    if vm.state is not VmState.READY or vm.workers or not jobs.keys().isdisjoint(newcomers):
        return False
    return not any(job_id in jobs and vm.id not in jobs[job_id] for job_id in vm.setting_up | vm.preparing)


def continue_clocks(since: Mapping[str, float], vm_ids: Iterable[str], now: float) -> dict[str, float]:
    """By VM, the time from which on it has been among `vm_ids` without a break."""
    return {vm_id: since.get(vm_id, now) for vm_id in vm_ids}


def count_enough_vms(vms: Collection[VmView], left_s: Mapping[str, float], spare_after_s: float) -> int | None:
    """How many VMs are enough for the jobs, because they have left the others over for long. None: this is not known.

    VMs come one after the other. So the first that is left over waits until the others are too, or are in use: jobs may
    take several where one is of no use. A VM that is in quarantine, which ends, counts as needed.

    Args:
        left_s: how long jobs that train have left VMs idle that they could have taken.
    """
    free = [vm for vm in vms if vm.trusted and not vm.workers]
    long_left = {vm_id for vm_id, seconds in left_s.items() if seconds >= spare_after_s}
    if not long_left:
        return None
    if any(vm.id not in long_left for vm in free) and max(left_s.values()) < _PATIENCE * spare_after_s:
        return None
    # A cordoned VM counts while it works: another one takes its place when it is given back.
    there = [vm for vm in vms if vm.state in (VmState.READY, VmState.SUSPECT) and (vm.workers or not vm.cordoned)]
    return sum(vm.id not in long_left for vm in there)
