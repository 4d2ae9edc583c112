"""Loads what the job controller decides on: rows and live state, as the domain's frozen views."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.commands import Presence
from varuna_manager.domain.morphs import RECENT, Morphs, PastShape, look_back
from varuna_manager.domain.observed import Device, GenerationView, JobView, Plan, Rules, StopView, VmView, WorkerView
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import (
    TERMINAL_JOB_STATES,
    EndCause,
    GenerationKind,
    GenerationState,
    VmState,
)
from varuna_manager.services.fleet import live_workers
from varuna_manager.services.vm_registry import VmRegistry


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job with its newest generation: the rows (detached, to read only) and the view for the decision."""

    row: JobRow
    version: int
    spec: JobSpec
    generation: GenerationRow | None
    workers: tuple[WorkerRow, ...]
    """Of that generation, by rank."""
    view: JobView
    """Without devices and proposal: these depend on the older jobs' decisions."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    jobs: tuple[LoadedJob, ...]
    """All that are not over, oldest first."""
    vms: Mapping[str, VmView]
    """All that are not gone."""
    occupied: Mapping[Device, str]
    """Devices with a worker that has not stopped, and the id of its job."""
    presence: Mapping[str, tuple[Presence, ...]]
    """By VM: every generation with a worker there that has not stopped."""

    def devices_for(self, job: LoadedJob, claimed: frozenset[Device]) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
        """(the devices that the job may be launched on, those that it might be, were they not quarantined).

        Of usable VMs, not another job's or claimed by an older one.
        """
        devices = [Device(vm.id, index) for vm in self.vms.values() if vm.usable for index in range(vm.gpus)]
        ours = sorted(d for d in devices if self.occupied.get(d, job.row.id) == job.row.id and d not in claimed)
        kept_out = {device for device in ours if self.vms[device.vm_id].quarantined}
        return tuple(d for d in ours if d not in kept_out), tuple(d for d in ours if d in kept_out)


class SnapshotLoader:
    def __init__(
        self, database: Database, registry: VmRegistry, rules: Rules, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._registry = registry
        self._rules = rules
        self._now = now
        self._started_at = now()

    async def load(self) -> Snapshot:
        """What is so now, from one read of the store and the registry."""
        async with self._database.read() as session:
            vm_rows = (await session.scalars(select(VmRow).where(VmRow.state != VmState.GONE.value))).all()
            alive = await live_workers(session)
            vms = self._vm_views(vm_rows, alive)
            query = select(JobRow).where(JobRow.state.not_in([state.value for state in TERMINAL_JOB_STATES]))
            rows = (await session.scalars(query.order_by(JobRow.created_at, JobRow.id))).all()
            coming = sum(vm.state is VmState.REQUESTED for vm in vms.values())
            returning = self._returning(vms)
            jobs = [await self._load_job(session, row, vms, coming, returning) for row in rows]
            presence = await self._presence(session, alive)
        occupied = {Device(worker.vm_id, worker.local_rank): worker.job_id for worker in alive}
        return Snapshot(jobs=tuple(jobs), vms=vms, occupied=occupied, presence=presence)

    def _vm_views(self, rows: Sequence[VmRow], alive: Sequence[WorkerRow]) -> dict[str, VmView]:
        now = self._now()
        return {
            row.id: self._registry.view(row, now=now, workers=sum(worker.vm_id == row.id for worker in alive))
            for row in rows
        }

    def _returning(self, vms: Mapping[str, VmView]) -> int:
        """Planning without them would give a small generation, and a morph as soon as they are back."""
        if self._now() - self._started_at >= self._rules.start_settle_s:
            return 0
        return sum(vm.state is VmState.READY and not vm.heard_since_start for vm in vms.values())

    async def _load_job(
        self, session: AsyncSession, row: JobRow, vms: Mapping[str, VmView], coming: int, returning: int
    ) -> LoadedJob:
        query = select(GenerationRow).where(GenerationRow.job_id == row.id).order_by(GenerationRow.number.desc())
        newest = await session.scalar(query.limit(1))
        workers: tuple[WorkerRow, ...] = ()
        if newest is not None:
            of_newest = (WorkerRow.job_id == row.id, WorkerRow.generation == newest.number)
            workers = tuple((await session.scalars(select(WorkerRow).where(*of_newest).order_by(WorkerRow.rank))).all())
        spec = JobSpec.model_validate(row.spec)
        view = JobView(
            id=row.id,
            name=row.name,
            state=row.job_state,
            created_at=row.created_at,
            global_batch=spec.global_batch,
            min_gpus=spec.resources.min_gpus,
            max_gpus=spec.resources.max_gpus,
            profiled_at=row.profiled_at,
            profile_only=spec.profile_only,
            profile_error=row.profile_error or "",
            generation=None if newest is None else self._generation_view(newest, workers, vms),
            setbacks=await _setbacks(session, row.id),
            morphs=await _morphs(session, row.id),
            coming_vms=coming,
            returning_vms=returning,
        )
        return LoadedJob(row=row, version=row.version, spec=spec, generation=newest, workers=workers, view=view)

    def _generation_view(
        self, row: GenerationRow, workers: Sequence[WorkerRow], vms: Mapping[str, VmView]
    ) -> GenerationView:
        stop = None
        if row.stop_requested_at is not None:
            mode, cause = row.mode_of_stop, row.stop_cause
            assert mode is not None
            assert cause is not None
            stop = StopView(
                mode=mode, cause=EndCause(cause), reason=row.stop_reason or "", requested_at=row.stop_requested_at
            )
        return GenerationView(
            number=row.number,
            kind=row.generation_kind,
            state=row.generation_state,
            workers=tuple(self._worker_view(worker, vms) for worker in workers),
            progress_at=self._progress_at(row),
            plan=Plan.from_document(row.plan),
            last_step=row.last_step,
            stop=stop,
            end_reason=row.end_reason or "",
        )

    def _progress_at(self, row: GenerationRow) -> float:
        # A manager that was away has missed the steps of that time: the clock starts with it.
        progress_at = max(row.last_step_at or row.created_at, self._started_at)
        evaluated_s = self._registry.evaluated_s(row.job_id, row.number)
        return progress_at if evaluated_s is None else max(progress_at, self._now() - evaluated_s)

    def _worker_view(self, row: WorkerRow, vms: Mapping[str, VmView]) -> WorkerView:
        vm = vms.get(row.vm_id)
        return WorkerView(
            rank=row.rank,
            device=Device(row.vm_id, row.local_rank),
            state=row.worker_state,
            cause=row.exit_cause,
            error=row.error_text or "",
            stopped_at=row.stopped_at,
            lease_over=vm is not None and vm.state is VmState.LOST and vm.silent_s >= self._rules.lease_s,
        )

    async def _presence(self, session: AsyncSession, alive: Sequence[WorkerRow]) -> dict[str, tuple[Presence, ...]]:
        parts: dict[tuple[str, str, int], list[WorkerRow]] = {}
        for worker in alive:
            parts.setdefault((worker.vm_id, worker.job_id, worker.generation), []).append(worker)
        found: dict[str, tuple[Presence, ...]] = {}
        for (vm_id, job_id, number), workers in parts.items():
            query = select(GenerationRow).where(GenerationRow.job_id == job_id, GenerationRow.number == number)
            generation = (await session.scalars(query)).one()
            part = Presence(
                job_id=job_id,
                generation=number,
                state=GenerationState(generation.state),
                stop_mode=generation.mode_of_stop,
                worker_states=tuple(worker.worker_state for worker in workers),
            )
            found[vm_id] = (*found.get(vm_id, ()), part)
        return found


async def _setbacks(session: AsyncSession, job_id: str) -> Setbacks:
    """Without the rows' documents: a job on spot VMs comes to have thousands of generations."""
    row = GenerationRow
    query = select(row.end_cause, row.end_reason, row.last_step, row.ended_at)
    query = query.where(row.job_id == job_id, row.state == GenerationState.ENDED.value).order_by(row.number)
    return count_setbacks(
        PastGeneration(
            cause=None if cause is None else EndCause(cause),
            reason=reason or "",
            last_step=last_step,
            ended_at=ended_at or 0.0,
        )
        for cause, reason, last_step, ended_at in await session.execute(query)
    )


async def _morphs(session: AsyncSession, job_id: str) -> Morphs:
    row = GenerationRow
    query = select(row).where(
        row.job_id == job_id, row.state == GenerationState.ENDED.value, row.kind == GenerationKind.TRAINING.value
    )
    rows = (await session.scalars(query.order_by(row.number.desc()).limit(RECENT))).all()
    return look_back([_past_shape(ended) for ended in rows])


def _past_shape(row: GenerationRow) -> PastShape:
    morph_s = None
    if row.resumed_step and row.seconds_without_progress is not None:  # one that starts at 0 waited for other things
        morph_s = max(0.0, row.seconds_without_progress - Plan.from_document(row.plan).predicted_minibatch_s)
    return PastShape(lifetime_s=(row.ended_at or row.created_at) - row.created_at, morph_s=morph_s)


def with_devices(job: LoadedJob, devices: tuple[Device, ...], quarantined: tuple[Device, ...]) -> JobView:
    return replace(job.view, devices=devices, quarantined=quarantined)


def previous_placement(job: LoadedJob) -> tuple[tuple[Device, ...], int | None]:
    """Where the ranks of the newest generation are or were, and its P; ((), None) when it did not train."""
    if job.generation is None or job.generation.kind != GenerationKind.TRAINING:
        return (), None
    devices = tuple(Device(worker.vm_id, worker.local_rank) for worker in job.workers)
    return devices, Plan.from_document(job.generation.plan).p
