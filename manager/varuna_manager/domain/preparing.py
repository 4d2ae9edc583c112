"""Which VMs make the workdirs of which jobs ready.

Only those on which the job is going to run: the VMs of its share of the fleet, as that will be once it can use it. The
jobs that run there keep their GPUs until then (`domain.sharing.hold_back`). A VM works on one workdir at a time, on the
most urgent job's first.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.states import VmState


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A job that is not over, as far as it matters for where it will run."""

    id: str
    makes_workdir: bool
    min_gpus: int
    most_gpus: int | None
    """What it may have, by its own limit and by its share; None: any number."""
    runs_on: Mapping[str, int] = field(default_factory=dict)
    """GPUs of its newest generation, by VM."""
    failed_on: frozenset[str] = frozenset()
    """VMs on which its workdir could not be made ready."""
    unfit_on: frozenset[str] = frozenset()
    """VMs whose GPUs are not as it asks."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where jobs are going to run. Empty where no job has a workdir to be made ready."""

    by_job: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """GPUs of each job, by VM."""
    to_prepare: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By VM, the jobs whose workdir is to be ready there, the most urgent first."""


class Readiness:
    """On which VMs workdirs are ready or under way, by job. Made once for a look at all jobs."""

    def __init__(self, vms: Iterable[VmView]) -> None:
        self.ready: dict[str, dict[str, int]] = {}
        """By job and VM, the VM's GPUs."""
        self.under_way: dict[str, list[str]] = {}
        for vm in vms:
            for job_id in vm.prepared:
                self.ready.setdefault(job_id, {})[vm.id] = vm.gpus
            for job_id in vm.setting_up:
                self.under_way.setdefault(job_id, []).append(vm.id)


def assign_places(tenants: Sequence[Tenant], vms: Mapping[str, VmView]) -> Places:
    """`tenants`: the most urgent first. One whose minimum is not here, nor on its way, prepares nowhere."""
    if not any(tenant.makes_workdir for tenant in tenants):
        return Places()
    in_use = {vm_id for tenant in tenants for vm_id in tenant.runs_on}
    usable = sorted((vm.id in in_use, vm.id) for vm in vms.values() if vm.usable and not vm.quarantined)
    gpus = {vm_id: vms[vm_id].gpus for _, vm_id in usable}
    here, readiness = sum(gpus.values()), Readiness(vms.values())
    coming = sum(vm.gpus for vm in vms.values() if vm.state is VmState.REQUESTED)
    by_job: dict[str, Mapping[str, int]] = {}
    to_prepare: dict[str, list[str]] = {}
    free, left = dict(gpus), here
    for tenant in tenants:
        fitting = left - sum(free.get(vm_id, 0) for vm_id in tenant.unfit_on)
        wanted = fitting if tenant.most_gpus is None else min(tenant.most_gpus, fitting)
        if wanted > 0 and tenant.min_gpus <= fitting:
            by_job[tenant.id] = taken = _take(tenant, wanted, free, readiness)
            left -= wanted
            for vm_id in taken if tenant.makes_workdir else ():
                to_prepare.setdefault(vm_id, []).append(tenant.id)
    for tenant in tenants:  # those that wait for VMs on their way: after all that can run now
        if tenant.makes_workdir and here < tenant.min_gpus <= here + coming:
            for vm_id in gpus.keys() - tenant.unfit_on:
                to_prepare.setdefault(vm_id, []).append(tenant.id)
    return Places(by_job=by_job, to_prepare={vm_id: tuple(jobs) for vm_id, jobs in to_prepare.items()})


def _take(tenant: Tenant, wanted: int, free: dict[str, int], readiness: Readiness) -> dict[str, int]:
    """Take GPUs from `free`: where the job runs, where its workdir is ready or nearly so, then in the order of `free`.

    Those where its workdir could not be made ready come last.
    """
    ready, under_way = readiness.ready.get(tenant.id, {}), readiness.under_way.get(tenant.id, ())
    failed = tenant.failed_on - ready.keys()
    near = dict.fromkeys((*sorted(tenant.runs_on), *sorted(ready), *sorted(under_way)))
    last = tenant.unfit_on | failed
    first = [vm_id for vm_id in near if vm_id in free and vm_id not in last]
    rest = (vm_id for vm_id in free if vm_id not in last and vm_id not in near)
    taken: dict[str, int] = {}
    for vm_id in itertools.chain(first, rest, (vm_id for vm_id in free if vm_id in failed - tenant.unfit_on)):
        if wanted <= 0:
            break
        taken[vm_id] = min(free[vm_id], wanted)
        wanted -= taken[vm_id]
    for vm_id, gpus in taken.items():
        free[vm_id] -= gpus
        if not free[vm_id]:
            del free[vm_id]
    return taken


def next_to_prepare(vm: VmView, planned: Iterable[str], told_ago_s: Mapping[str, float], rules: Rules) -> str | None:
    """The job whose workdir the VM is to make ready now. None: there is none, or one is under way.

    What failed is tried again after a while, and does not keep the next one waiting.

    Args:
        planned: for this VM, the most urgent first.
        told_ago_s: by job, how long ago the agent was told to.
    """
    if vm.setting_up:
        return None
    for job_id in planned:
        if job_id in vm.prepared:
            continue
        ago_s = told_ago_s.get(job_id)
        if ago_s is None or ago_s >= rules.prepare_again_s:
            return job_id
        if ago_s < rules.suspect_after_s:
            return None  # the agent may be about to begin
    return None


def stale_jobs(
    vm: VmView, planned: Collection[str], unfinished: Collection[str], runs: Collection[str]
) -> frozenset[str]:
    """Jobs for which the VM keeps, or makes, something ready that nobody needs.

    Args:
        planned: for this VM.
        unfinished: jobs that are not over: what is ready for them stays.
        runs: jobs with workers there.
    """
    kept = {job_id for job_id in vm.prepared if job_id not in unfinished}
    made = {job_id for job_id in vm.setting_up if job_id not in planned}
    return frozenset((kept | made) - set(runs))
