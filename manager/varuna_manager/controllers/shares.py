"""Shares the fleet's GPUs out among the jobs, from what is observed of them and the planner's rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from varuna_manager.controllers.job_view import LoadedJob, Snapshot
from varuna_manager.domain.observed import JobView, Rules
from varuna_manager.domain.sharing import Contender, RatePoint, Share, share
from varuna_manager.domain.states import JobState
from varuna_manager.services.rates import RateQuestion, RateService


@dataclass(frozen=True, kw_only=True)
class Shares:
    by_job: Mapping[str, Share] = field(default_factory=dict)
    """Empty: there is one job at most, and all is its own."""
    over: frozenset[str] = frozenset()
    """Jobs that have more than their share, and are about to give it up."""

    def give(self, view: JobView) -> JobView:
        given = self.by_job.get(view.id)
        if given is None:
            return view
        due = bool(self.over - {view.id})
        return replace(view, share=given.gpus, share_reason=given.reason, share_due=due)


class ShareOut:
    def __init__(self, rates: RateService, rules: Rules) -> None:
        self._rates = rates
        self._rules = rules
        self._asked: tuple[tuple[Contender, ...], int] = ((), 0)
        self._answer = Shares()

    async def of(self, snapshot: Snapshot) -> Shares:
        """Worked out anew only when something that it depends on has changed."""
        if len(snapshot.jobs) < 2:
            return Shares()
        gpus = snapshot.gpus
        curves = await self._curves(snapshot, gpus)
        contenders = tuple(self._contender(job, snapshot, curves) for job in snapshot.jobs)
        if (contenders, gpus) != self._asked:
            by_job = share(contenders, gpus)
            over = frozenset(job.id for job in contenders if job.has > by_job[job.id].gpus)
            self._asked, self._answer = (contenders, gpus), Shares(by_job=by_job, over=over)
        return self._answer

    async def _curves(self, snapshot: Snapshot, gpus: int) -> Mapping[str, tuple[RatePoint, ...] | None]:
        memory = min((vm.device_memory_bytes for vm in snapshot.usable if vm.device_memory_bytes), default=None)
        gpus_per_vm = min((vm.gpus for vm in snapshot.usable), default=1)
        jobs = [job for job in snapshot.jobs if _trains(job)]
        questions = [
            RateQuestion(
                profile_json=job.row.profile_json or "",
                spec=job.spec,
                most=min(gpus, job.view.max_gpus or gpus),
                device_memory_bytes=memory,
                gpus_per_vm=gpus_per_vm,
            )
            for job in jobs
        ]
        curves = await self._rates.curves(questions)
        return {job.row.id: curve for job, curve in zip(jobs, curves, strict=True)}

    def _contender(
        self, job: LoadedJob, snapshot: Snapshot, curves: Mapping[str, tuple[RatePoint, ...] | None]
    ) -> Contender:
        view, rates = job.view, curves.get(job.row.id)
        has, most = _has(job, snapshot), view.max_gpus
        if not _trains(job):  # it is being measured: a GPU for each example, at most
            most = min(most or view.global_batch, view.global_batch)
        elif rates is None:  # the planner is still at it: until then nothing is moved for this job's sake
            most = max(has, view.min_gpus)
        return Contender(
            id=view.id,
            name=view.name,
            priority=job.spec.priority,
            created_at=view.created_at,
            min_gpus=view.min_gpus,
            max_gpus=None if most is None else max(most, view.min_gpus),
            has=has,
            runs=view.state is JobState.RUNNING,
            rates=rates,
            worthwhile_ratio=view.morphs.worthwhile_ratio(self._rules.growth_ratio),
            leaving=view.state is JobState.CANCELLING,
        )


def _trains(job: LoadedJob) -> bool:
    return job.view.profiled_at is not None and not job.view.profile_only


def _has(job: LoadedJob, snapshot: Snapshot) -> int:
    """Devices of its newest generation, as long as it runs, that it still has or could have again at once."""
    if job.view.state not in (JobState.RUNNING, JobState.CANCELLING):
        return 0
    count = 0
    for worker in job.workers:
        vm = snapshot.vms.get(worker.vm_id)
        count += worker.is_alive or (vm is not None and vm.usable and not vm.quarantined)
    return count
