"""Which VMs prepare workdirs, and for which jobs.

A workdir is prepared on the VMs of the job's future share of the fleet. The jobs that run there keep their GPUs until
it is ready (`domain.sharing.hold_back_shares`). A VM prepares one workdir at a time, the most urgent job's first.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.states import VmState


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """What decides where a job, which has not ended, will run."""

    id: str
    makes_workdir: bool
    min_gpus: int
    most_gpus: int | None
    """The most GPUs that it may have, by its own limit and by its share; None: any number."""
    runs_on: Mapping[str, int] = field(default_factory=dict)
    """GPUs of its newest generation, by VM."""
    failed_on: frozenset[str] = frozenset()
    """VMs on which preparing its workdir has failed."""
    unfit_on: frozenset[str] = frozenset()
    """VMs whose GPUs do not match its resources."""


@dataclass(frozen=True, kw_only=True)
class JobPlaces:
    """Where jobs are going to run. Empty if no job has a workdir to prepare."""

    by_job: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """GPUs of each job, by VM."""
    to_prepare: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By VM, the jobs whose workdir is to be prepared there, the most urgent first."""


class WorkdirReadiness:
    """On which VMs workdirs are ready or being prepared, by job. Made once per look at all jobs."""

    def __init__(self, vms: Iterable[VmView]) -> None:
        self.ready: dict[str, dict[str, int]] = {}
        """By job and VM, the VM's GPUs."""
        self.under_way: dict[str, list[str]] = {}
        for vm in vms:
            for job_id in vm.prepared:
                self.ready.setdefault(job_id, {})[vm.id] = vm.gpus
            for job_id in vm.setting_up:
                self.under_way.setdefault(job_id, []).append(vm.id)


def assign_places(tenants: Sequence[Tenant], vms: Mapping[str, VmView]) -> JobPlaces:
    """`tenants`: the most urgent first. A job whose minimum is neither here nor requested prepares nowhere."""
    if not any(tenant.makes_workdir for tenant in tenants):
        return JobPlaces()
    in_use = {vm_id for tenant in tenants for vm_id in tenant.runs_on}
    usable = sorted((vm.id in in_use, vm.id) for vm in vms.values() if vm.trusted)
    gpus = {vm_id: vms[vm_id].gpus for _, vm_id in usable}
    here, readiness = sum(gpus.values()), WorkdirReadiness(vms.values())
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
    return JobPlaces(by_job=by_job, to_prepare={vm_id: tuple(jobs) for vm_id, jobs in to_prepare.items()})


def _take(tenant: Tenant, wanted: int, free: dict[str, int], readiness: WorkdirReadiness) -> dict[str, int]:
    """Take GPUs from `free`: first where the job runs, then where its workdir is ready or being prepared, then others.

    VMs where preparing its workdir has failed come last.
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


def choose_workdir(vm: VmView, planned: Iterable[str], sent_ago_s: Mapping[str, float], rules: Rules) -> str | None:
    """The job whose workdir the VM is to prepare now. None: there is none, or one is being prepared.

    A failed preparation is tried again after a while, and does not keep the next job waiting.

    Args:
        planned: for this VM, the most urgent first.
        sent_ago_s: by job, how long ago the command was sent to the agent.
    """
    if vm.setting_up:
        return None
    for job_id in planned:
        if job_id in vm.prepared:
            continue
        ago_s = sent_ago_s.get(job_id)
        if ago_s is None or ago_s >= rules.prepare_again_s:
            return job_id
        if ago_s < rules.suspect_after_s:
            return None  # the agent may be about to begin
    return None


def list_stale_jobs(
    vm: VmView, planned: Collection[str], unfinished: Collection[str], runs: Collection[str]
) -> frozenset[str]:
    """Jobs for which the VM keeps or prepares a workdir that is no longer needed.

    Args:
        planned: for this VM.
        unfinished: jobs that have not ended. What is ready for them stays.
        runs: jobs with workers there.
    """
    kept = {job_id for job_id in vm.prepared if job_id not in unfinished}
    made = {job_id for job_id in vm.setting_up if job_id not in planned}
    return frozenset((kept | made) - set(runs))
