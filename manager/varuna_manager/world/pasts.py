"""The past that decisions need: a job's ended generations, and the lives of VMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.models import GenerationRow, VmRow, WorkerRow
from varuna_manager.domain.fleet_past import LivesSummary, VmLife, summarize_lives
from varuna_manager.domain.leaving_step import part_left
from varuna_manager.domain.morphs import LOOKED_BACK, PastShape
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.states import EndCause, GenerationKind, GenerationState, StopMode, VmState
from varuna_manager.world.facts import GenerationProgress
from varuna_proto.plan import Plan

JOBS_LEARNED_FROM = 20
"""The newest, over or not: what their morphs cost is what a new job's should cost."""
_NETWORK_BYTES_PER_S = 1.25e9
"""An ordinary network's, at which a past morph's state is assumed to have moved. A slower one makes what morphs cost
besides seem larger, for this job as for others."""
_VMS_LOOKED_BACK = 5000
"""The newest, gone or not: their lifetimes show how long others will last."""


@dataclass(frozen=True, eq=False)
class JobPast:
    """The object is replaced when any of the job's ended generations changes."""

    setbacks: Setbacks = field(default_factory=Setbacks)
    shapes: tuple[PastShape, ...] = ()
    """The last LOOKED_BACK of them, newest first: what its morphs have cost."""


async def read_past(session: AsyncSession, job_id: str, retried_after: int | None) -> JobPast:
    """`retried_after`: generations up to this number do not count against the job."""
    return JobPast(await _read_setbacks(session, job_id, retried_after or 0), await _read_shapes(session, job_id))


async def _read_setbacks(session: AsyncSession, job_id: str, forgiven: int) -> Setbacks:
    """Reads no documents of the rows, because a job on spot VMs may have thousands of generations."""
    row = GenerationRow
    query = select(row.number, row.end_cause, row.end_reason, row.last_step, row.ended_at)
    query = query.where(row.job_id == job_id, row.state == GenerationState.ENDED.value).order_by(row.number)
    return count_setbacks(
        PastGeneration(
            cause=None if cause is None else EndCause(cause),
            reason=reason or "",
            last_step=last_step,
            ended_at=ended_at or 0.0,
            forgiven=number <= forgiven,
        )
        for number, cause, reason, last_step, ended_at in await session.execute(query)
    )


async def _read_shapes(session: AsyncSession, job_id: str) -> tuple[PastShape, ...]:
    row = GenerationRow
    query = select(row).options(defer(row.candidates), defer(row.history)).execution_options(populate_existing=True)
    query = query.where(
        row.job_id == job_id, row.state == GenerationState.ENDED.value, row.kind == GenerationKind.TRAINING.value
    )
    rows = (await session.scalars(query.order_by(row.number.desc()).limit(LOOKED_BACK + 1))).all()
    before = {new.number: old for new, old in pairwise(rows)}
    moved = await _read_moved_bytes(session, job_id, [ended.number for ended in rows[:LOOKED_BACK]])
    return tuple(_past_shape(ended, before.get(ended.number), moved) for ended in rows[:LOOKED_BACK])


async def _read_moved_bytes(session: AsyncSession, job_id: str, numbers: Sequence[int]) -> Mapping[int, int]:
    """Of each generation, the most bytes that one worker took from memories or the store before it trained."""
    taken = func.max(func.coalesce(WorkerRow.peer_bytes, 0) + func.coalesce(WorkerRow.store_bytes, 0))
    query = select(WorkerRow.generation, taken).group_by(WorkerRow.generation)
    query = query.where(WorkerRow.job_id == job_id, WorkerRow.generation.in_(numbers))
    return {number: int(most or 0) for number, most in await session.execute(query)}


def _past_shape(row: GenerationRow, before: GenerationRow | None, moved: Mapping[int, int]) -> PastShape:
    """`before`: the previous training generation; `moved`: bytes by generation."""
    morph_s = None
    if row.resumed_step and row.started_at is not None:  # one that starts at 0 waited for other things
        stop_s = 0.0
        trained_on = before is not None and before.stop_mode == StopMode.HOLD_WITHIN_STEP
        if before is not None and before.ended_at is not None and not trained_on:
            # A planned stop comes with the end of a step; what a loss cost of the step under way is no part of a morph.
            stop_s = before.ended_at - max(before.last_step_at or 0.0, before.stop_requested_at or before.ended_at)
        morph_s = max(0.0, row.started_at - row.created_at - _first_step_s(row)) + max(0.0, stop_s)
    return PastShape(
        ended_at=row.ended_at or row.created_at,
        morph_s=morph_s,
        moving_s=moved.get(row.number, 0) / _NETWORK_BYTES_PER_S,
        save_s=row.save_s,
        in_place=row.in_place,
    )


def _first_step_s(row: GenerationRow) -> float:
    """What its first step should have taken: as its later steps took, or as predicted where it made none.

    A generation in place may have run a part of that step before."""
    plan = Plan.from_document(row.plan)
    progress = GenerationProgress(*(getattr(row, name) for name in GenerationProgress._fields))
    step_s = plan.predicted_minibatch_s if progress.mean_step_s is None else progress.mean_step_s
    return step_s * part_left(plan, row.micro_batches_left) if row.in_place else step_s


async def read_fleet_shapes(session: AsyncSession) -> dict[str, tuple[PastShape, ...]]:
    """The last shapes of the jobs whose training generations were the last to begin. A new leader begins with them."""
    row = GenerationRow
    query = select(row.job_id).where(row.kind == GenerationKind.TRAINING.value).group_by(row.job_id)
    jobs = await session.scalars(query.order_by(func.max(row.id).desc()).limit(JOBS_LEARNED_FROM))
    return {job_id: await _read_shapes(session, job_id) for job_id in jobs.all()}


async def read_lives_by_pool(session: AsyncSession, now: float) -> dict[str, LivesSummary]:
    """What earlier managers observed of each pool's VMs."""
    row = VmRow
    query = select(row.pool, row.created_at, row.notice_deadline, row.history).where(row.pool.is_not(None))
    lives: dict[str, list[VmLife]] = {}
    for pool, *life in await session.execute(query.order_by(row.created_at.desc()).limit(_VMS_LOOKED_BACK)):
        lives.setdefault(pool, []).append(_make_life(*life))
    return {pool: summarize_lives(of_pool, now) for pool, of_pool in lives.items()}


async def read_lives_summary(session: AsyncSession, now: float) -> LivesSummary:
    """What earlier managers observed of the fleet, from the rows that they wrote."""
    row = VmRow
    query = select(row.created_at, row.notice_deadline, row.history).order_by(row.created_at.desc())
    rows = await session.execute(query.limit(_VMS_LOOKED_BACK))
    return summarize_lives((_make_life(*row) for row in rows), now)


def _make_life(created_at: float, notice_deadline: float | None, history: Sequence[Mapping[str, Any]]) -> VmLife:
    return VmLife(
        created_at=created_at,
        states=[(entry["at"], VmState(entry["state"])) for entry in history],
        notice_deadline=notice_deadline,
    )
