"""Shares the fleet's GPUs out among the jobs, by their views and the planner's rates, and assigns their VMs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from varuna_manager.controllers.job_view import LoadedJob, Snapshot, is_fitting, trained_micro_batch
from varuna_manager.domain.better_shape import find_worthwhile_ratio, gpu_limit
from varuna_manager.domain.fitting import is_choosy
from varuna_manager.domain.observed import JobView, Rules
from varuna_manager.domain.preparing import JobPlaces, Tenant, assign_places
from varuna_manager.domain.sharing import Contender, RatePoint, Share, hold_back_shares, share_gpus
from varuna_manager.domain.states import JobState
from varuna_manager.planning.rates import RateQuestion, RateService


@dataclass(frozen=True, kw_only=True)
class Shares:
    by_job: Mapping[str, Share] = field(default_factory=dict)
    """Empty: there is at most one job, which may have everything."""
    over: frozenset[str] = frozenset()
    """Jobs that have more than their share and are about to give it up."""
    places: JobPlaces = field(default_factory=JobPlaces)
    """Where the jobs will run with their shares, once all are prepared."""

    def with_share(self, view: JobView) -> JobView:
        given = self.by_job.get(view.id)
        if given is None:
            return view
        due = bool(self.over - {view.id})
        return replace(view, share=given.gpus, share_reason=given.reason, share_due=due)


@dataclass(kw_only=True)
class _ReadyGpus:
    """How many ready GPUs count, so that other jobs give way once, and not for each VM."""

    gpus: int = 0
    seen: int = 0
    since: float

    def update_count(self, seen: int, wanted: int, now: float, patience_s: float) -> None:
        """More count when all wanted ones are ready, or when no further one became ready for `patience_s`."""
        if seen != self.seen:
            self.seen, self.since = seen, now
        if seen >= wanted or seen < self.gpus or now - self.since >= patience_s:
            self.gpus = seen


class ShareOut:
    def __init__(self, rates: RateService, rules: Rules, now: Callable[[], float] = time.time) -> None:
        self._rates = rates
        self._rules = rules
        self._now = now
        self._asked: tuple[tuple[Contender, ...], int] = ((), 0)
        self._wishes: Mapping[str, Share] = {}
        self._ready: dict[str, _ReadyGpus] = {}
        self._held: Mapping[str, int] = {}
        self._answer = Shares()

    async def compute_shares(self, snapshot: Snapshot) -> Shares:
        """Recomputed only when an input has changed."""
        if len(snapshot.jobs) < 2:
            return Shares(places=assign_places(tuple(_tenants(snapshot, {})), snapshot.vms))
        gpus = snapshot.gpus
        curves = await self._curves(snapshot, gpus)
        contenders = tuple(self._contender(job, snapshot, curves) for job in snapshot.jobs)
        is_new = (contenders, gpus) != self._asked
        if is_new:
            self._asked, self._wishes = (contenders, gpus), share_gpus(contenders, gpus)
        places = assign_places(tuple(_tenants(snapshot, self._wishes)), snapshot.vms)
        ready = self._count_ready(snapshot, places)
        if is_new or (ready, places) != (self._held, self._answer.places):
            by_job = hold_back_shares(self._wishes, contenders, gpus, ready)
            over = frozenset(job.id for job in contenders if job.has > by_job[job.id].gpus)
            self._held, self._answer = ready, Shares(by_job=by_job, over=over, places=places)
        return self._answer

    def _count_ready(self, snapshot: Snapshot, places: JobPlaces) -> Mapping[str, int]:
        """By job that has a workdir to be made ready, the GPUs among its places where it runs or could start."""
        before, self._ready = self._ready, {}
        for job in snapshot.jobs:
            if not job.spec.needs_preparing:
                continue
            own, place = _gpus_of(job, snapshot), places.by_job.get(job.row.id, {})
            seen = sum(
                gpus for vm_id, gpus in place.items() if vm_id in own or job.row.id in snapshot.vms[vm_id].prepared
            )
            counted = before.get(job.row.id) or _ReadyGpus(since=self._now())
            counted.update_count(seen, self._wishes[job.row.id].gpus, self._now(), self._rules.growth_prepare_s)
            self._ready[job.row.id] = counted
        return {job_id: counted.gpus for job_id, counted in self._ready.items()}

    async def _curves(self, snapshot: Snapshot, gpus: int) -> Mapping[str, tuple[RatePoint, ...] | None]:
        jobs = [job for job in snapshot.jobs if _trains(job)]
        questions = [_question(job, snapshot, gpus) for job in jobs]
        curves = await self._rates.list_rate_curves(questions)
        return {job.row.id: curve for job, curve in zip(jobs, curves, strict=True)}

    def _contender(
        self, job: LoadedJob, snapshot: Snapshot, curves: Mapping[str, tuple[RatePoint, ...] | None]
    ) -> Contender:
        view, rates = job.view, curves.get(job.row.id)
        if rates == () and view.generation is not None and view.generation.live:
            rates = None  # it trains, so it fits where it is: the planner was asked for the smallest memory of all VMs
        has, most = _has(job, snapshot), view.max_gpus
        vms = 1 if view.generation is None else max(1, len(view.generation.vm_ids))
        if not _trains(job):  # it is being measured: at most one GPU for each example
            most = min(most or view.global_batch, view.global_batch)
        elif rates is None:  # they are not known, or not yet: nothing is moved for this job
            most = max(has, view.min_gpus)
        return Contender(
            id=view.id,
            name=view.name,
            priority=job.spec.priority,
            created_at=view.created_at,
            min_gpus=view.min_gpus,
            max_gpus=None if most is None else max(most, view.min_gpus),
            fitting=snapshot.find_gpus(job.resources).gpus if is_choosy(job.resources) else None,
            has=has,
            runs=view.state is JobState.RUNNING,
            rates=rates,
            worthwhile_ratio=find_worthwhile_ratio(self._now(), view, vms, self._rules.growth_ratio),
            leaving=view.state is JobState.CANCELLING,
        )


def _question(job: LoadedJob, snapshot: Snapshot, gpus: int) -> RateQuestion:
    fitting = snapshot.find_gpus(job.resources)
    return RateQuestion(
        profile_json=job.row.profile_json or "",
        spec=job.spec,
        most=min(gpus, job.view.max_gpus or gpus, fitting.gpus),
        device_memory_bytes=fitting.least_memory_bytes,
        gpus_per_vm=fitting.least_per_vm,
        trained_micro_batch=trained_micro_batch(job),
        margin=job.view.margin,
    )


def _trains(job: LoadedJob) -> bool:
    return job.view.profiled_at is not None and not job.view.profile_only


def _has(job: LoadedJob, snapshot: Snapshot) -> int:
    return sum(_gpus_of(job, snapshot).values())


def _gpus_of(job: LoadedJob, snapshot: Snapshot) -> Mapping[str, int]:
    """By VM, devices of its newest generation, as long as it runs, that it still has or could have again at once."""
    if job.view.state not in (JobState.RUNNING, JobState.CANCELLING):
        return {}
    found: Counter[str] = Counter()
    for worker in job.workers:
        vm = snapshot.vms.get(worker.vm_id)
        if worker.is_alive or (vm is not None and vm.trusted):
            found[worker.vm_id] += 1
    return found


def _tenants(snapshot: Snapshot, wishes: Mapping[str, Share]) -> Iterator[Tenant]:
    """The most urgent job first, as shares go. `wishes`: empty where one job has all."""
    if not any(job.spec.needs_preparing for job in snapshot.jobs):
        return
    runs = {job.row.id: job.view.state is JobState.RUNNING for job in snapshot.jobs}
    for job in sorted(
        snapshot.jobs,
        key=lambda job: (-job.spec.priority, not runs[job.row.id], job.view.created_at, job.row.id),
    ):
        wish, least = wishes.get(job.row.id), job.view.min_gpus
        if wish is not None and wish.gpus > snapshot.gpus:
            least = wish.gpus  # the planner finds no plan for fewer
        leaves = job.view.state is JobState.CANCELLING
        yield Tenant(
            id=job.row.id,
            makes_workdir=job.spec.needs_preparing and not leaves,
            min_gpus=0 if leaves else least,
            most_gpus=gpu_limit(job.view if wish is None else replace(job.view, share=wish.gpus)),
            runs_on=_gpus_of(job, snapshot),
            failed_on=job.failed_on,
            unfit_on=_unfit_on(job, snapshot),
        )


def _unfit_on(job: LoadedJob, snapshot: Snapshot) -> frozenset[str]:
    wanted = job.resources
    if not is_choosy(wanted):
        return frozenset()
    return frozenset(vm_id for vm_id, vm in snapshot.vms.items() if not is_fitting(vm, wanted))
