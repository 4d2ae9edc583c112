"""Keeps the profiles of running jobs true, so that the next plan is made from what the devices do now."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import GenerationRow, JobRow
from varuna_manager.domain.observed import Plan
from varuna_manager.domain.states import GenerationKind, GenerationState, JobState
from varuna_manager.services.bell import Bell
from varuna_manager.services.compute_times import ComputeTimes
from varuna_manager.services.events import EventLog
from varuna_manager.services.planning import PlanningService

_PERIOD_S = 5.0
"""Drift is slow, and tells nothing that could not wait for a moment."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    job_id: str
    generation: int
    plan: Plan
    profile_json: str


class ProfileController:
    name = "profiles"

    def __init__(
        self, database: Database, times: ComputeTimes, planning: PlanningService, events: EventLog, bell: Bell
    ) -> None:
        self._database = database
        self._times = times
        self._planning = planning
        self._events = events
        self._bell = bell

    async def reconcile(self) -> float:
        all_running = await self._running()
        self._times.keep_only({running.job_id for running in all_running})
        for running in all_running:
            plan = running.plan
            times = self._times.medians_us(running.job_id, running.generation, plan.p * plan.d)
            if times is None:
                continue
            drift = await self._planning.find_drift(running.profile_json, plan, times)
            if drift is not None:
                await self._correct(running, *drift)
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
            rows = (await session.execute(query)).all()
        return [
            _Running(job_id=job_id, generation=number, plan=Plan.from_document(plan), profile_json=profile)
            for job_id, number, plan, profile in rows
        ]

    async def _correct(self, running: _Running, profile_json: str, reason: str) -> None:
        async with self._database.write() as session:
            job = await session.get_one(JobRow, running.job_id)
            if job.profile_json != running.profile_json:
                return  # a new one was measured meanwhile
            job.profile_json = profile_json
            self._events.add(session, "profile_drift", reason, job_id=running.job_id, generation=running.generation)
            after_commit(session, self._bell.ring)
        self._times.forget(running.job_id)
