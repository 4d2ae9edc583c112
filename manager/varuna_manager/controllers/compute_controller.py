"""Compares the times of running workers per micro-batch: is the profile still right, and is a VM slow?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.agents.compute_times import STEPS_KEPT, ComputeTimes, MicroBatchTimes
from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.states import GenerationKind, GenerationState, JobState
from varuna_manager.domain.stutter import RankTimes, Slowness, SlownessRecord, compare_ranks, update_records
from varuna_manager.planning.planning import PlanningService, ProfileCheck
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_proto.plan import Plan

_PERIOD_S = 5.0
"""Seconds between looks: a drift or a slow VM is not urgent."""
_NOTABLE_CHANGE = 0.1
"""Smaller changes of a slow VM's ratio are ignored, because the ratio is part of reasons, and a new one is an event."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    job_id: str
    generation: int
    plan: Plan
    profile_json: str
    vm_ids: tuple[str, ...]
    """By rank."""


class ComputeController:
    name = "compute"

    def __init__(
        self,
        database: Database,
        times: ComputeTimes,
        planning: PlanningService,
        events: EventLog,
        bell: Bell,
        rules: Rules,
    ) -> None:
        self._database = database
        self._times = times
        self._planning = planning
        self._events = events
        self._bell = bell
        self._rules = rules
        self._watched: dict[tuple[str, int], dict[str, SlownessRecord]] = {}

    async def reconcile_once(self) -> float:
        all_running = await self._running()
        self._times.keep_only({running.job_id for running in all_running})
        live = {(running.job_id, running.generation) for running in all_running}
        self._watched = {key: watched for key, watched in self._watched.items() if key in live}
        for running in all_running:
            took = self._times.collect_times(running.job_id, running.generation, running.vm_ids)
            if took is not None:
                medians = {rank: each.median_us for rank, each in took.items()}
                examined = await self._planning.compare_profile(running.profile_json, running.plan, medians)
                await self._note_slow_vms(running, _rank_times(running, took, examined))
                # The profile is corrected by whole windows only: a busy moment is no drift.
                is_whole = all(each.steps == STEPS_KEPT for each in took.values())
                if is_whole and examined.corrected_json is not None:
                    await self._correct(running, examined.corrected_json, examined.drift or "")
        await self._clear(all_running)
        return _PERIOD_S

    async def _running(self) -> list[_Running]:
        query = (
            select(JobRow.id, GenerationRow.number, GenerationRow.plan, JobRow.profile_json)
            .join(GenerationRow, GenerationRow.job_id == JobRow.id)
            .where(
                JobRow.state == JobState.RUNNING.value,
                JobRow.profile_json.is_not(None),
                GenerationRow.kind == GenerationKind.TRAINING.value,
                GenerationRow.state == GenerationState.RUNNING.value,
            )
        )
        async with self._database.read() as session:
            return [
                _Running(
                    job_id=job_id,
                    generation=number,
                    plan=Plan.from_document(plan),
                    profile_json=profile,
                    vm_ids=await _vm_ids(session, job_id, number),
                )
                for job_id, number, plan, profile in (await session.execute(query)).all()
            ]

    # ------------------------------------------------------------ slow VMs

    async def _note_slow_vms(self, running: _Running, ranks: Mapping[int, RankTimes]) -> None:
        slowness = compare_ranks(ranks)
        key = (running.job_id, running.generation)
        before = self._watched[key] if key in self._watched else await self._find_marked(running)
        after = update_records(before, slowness, threshold=self._rules.slow_threshold, looks=self._rules.slow_looks)
        self._watched[key] = after
        for vm_id, watched in after.items():
            if watched.is_slow:
                await self._mark(
                    running, vm_id, slowness[vm_id], is_new=not before.get(vm_id, SlownessRecord()).is_slow
                )
            elif before.get(vm_id, SlownessRecord()).is_slow:
                await self._unmark(vm_id, f"VM {vm_id} is no longer slow: {slowness[vm_id].reason}")

    async def _find_marked(self, running: _Running) -> dict[str, SlownessRecord]:
        """The VMs that another manager, or a generation before, has left marked as slow; no other job's here."""
        known = {vm_id for watched in self._watched.values() for vm_id, record in watched.items() if record.is_slow}
        is_marked = VmRow.id.in_(set(running.vm_ids) - known) & VmRow.slow_ratio.is_not(None)
        async with self._database.read() as session:
            marked = (await session.scalars(select(VmRow.id).where(is_marked))).all()
        return {vm_id: SlownessRecord(looks=self._rules.slow_looks, is_slow=True) for vm_id in marked}

    async def _mark(self, running: _Running, vm_id: str, slowness: Slowness, *, is_new: bool) -> None:
        async with self._database.write() as session:
            vm = await session.get_one(VmRow, vm_id)
            if is_new or vm.slow_ratio is None or abs(slowness.ratio / vm.slow_ratio - 1) > _NOTABLE_CHANGE:
                vm.slow_reason = slowness.reason if is_new or vm.slow_ratio is None else vm.slow_reason
                vm.slow_ratio = slowness.ratio
            if is_new:
                text = f"VM {vm_id} is slow: {slowness.reason}"
                data = {"ratio": slowness.ratio, "z": slowness.z, "rank": slowness.rank}
                self._events.emit_event(
                    session,
                    "vm_slow",
                    text,
                    job_id=running.job_id,
                    generation=running.generation,
                    vm_id=vm_id,
                    data=data,
                )
            after_commit(session, self._bell.notify_listeners)

    async def _unmark(self, vm_id: str, text: str) -> None:
        async with self._database.write() as session:
            vm = await session.get_one(VmRow, vm_id)
            vm.slow_ratio = vm.slow_reason = None
            self._events.emit_event(session, "vm_well", text, vm_id=vm_id)
            after_commit(session, self._bell.notify_listeners)

    async def _clear(self, all_running: list[_Running]) -> None:
        """A VM without work is not known to be slow: its ratio came from another generation."""
        busy = {vm_id for running in all_running for vm_id in running.vm_ids}
        async with self._database.read() as session:
            marked = (await session.scalars(select(VmRow.id).where(VmRow.slow_ratio.is_not(None)))).all()
        for vm_id in set(marked) - busy:
            await self._unmark(vm_id, f"VM {vm_id} is no longer compared with others")

    # ------------------------------------------------------------ the profile

    async def _correct(self, running: _Running, profile_json: str, reason: str) -> None:
        async with self._database.write() as session:
            job = await session.get_one(JobRow, running.job_id)
            if job.profile_json != running.profile_json:
                return  # a new profile was measured meanwhile
            job.profile_json = profile_json
            self._events.emit_event(
                session, "profile_drift", reason, job_id=running.job_id, generation=running.generation
            )
            after_commit(session, self._bell.notify_listeners)
        self._times.forget_job(running.job_id)


async def _vm_ids(session: AsyncSession, job_id: str, number: int) -> tuple[str, ...]:
    query = select(WorkerRow.vm_id).where(WorkerRow.job_id == job_id, WorkerRow.generation == number)
    return tuple((await session.scalars(query.order_by(WorkerRow.rank))).all())


def _rank_times(running: _Running, took: Mapping[int, MicroBatchTimes], examined: ProfileCheck) -> dict[int, RankTimes]:
    p = running.plan.p
    return {
        rank: RankTimes(
            stage=rank % p,
            vm_id=running.vm_ids[rank],
            median_us=each.median_us,
            mad_us=each.mad_us,
            steps=each.steps,
            expected_us=examined.expected_us[rank],
            gpu_type=examined.gpu_types[rank],
            is_type_profiled=examined.gpu_types[rank] not in examined.guessed_types,
        )
        for rank, each in took.items()
    }
