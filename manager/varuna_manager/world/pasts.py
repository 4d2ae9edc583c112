"""The past that decisions need: a job's ended generations, and the lives of VMs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.models import GenerationRow, VmRow
from varuna_manager.domain.fleet_past import LivesSummary, VmLife, summarize_lives
from varuna_manager.domain.morphs import LOOKED_BACK, MorphEstimate, PastShape, estimate_morphs
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.states import EndCause, GenerationKind, GenerationState, VmState
from varuna_proto.plan import Plan

_VMS_LOOKED_BACK = 5000
"""The newest, gone or not: their lifetimes show how long others will last."""


@dataclass(frozen=True, eq=False)
class JobPast:
    """The object is replaced when any of the job's ended generations changes."""

    setbacks: Setbacks = field(default_factory=Setbacks)
    morphs: MorphEstimate = field(default_factory=MorphEstimate)


async def read_past(session: AsyncSession, job_id: str, retried_after: int | None) -> JobPast:
    """`retried_after`: generations up to this number do not count against the job."""
    return JobPast(await _read_setbacks(session, job_id, retried_after or 0), await _read_morphs(session, job_id))


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


async def _read_morphs(session: AsyncSession, job_id: str) -> MorphEstimate:
    row = GenerationRow
    query = select(row).options(defer(row.candidates), defer(row.history)).execution_options(populate_existing=True)
    query = query.where(
        row.job_id == job_id, row.state == GenerationState.ENDED.value, row.kind == GenerationKind.TRAINING.value
    )
    rows = (await session.scalars(query.order_by(row.number.desc()).limit(LOOKED_BACK + 1))).all()
    before = {new.number: old for new, old in pairwise(rows)}
    return estimate_morphs([_past_shape(ended, before.get(ended.number)) for ended in rows[:LOOKED_BACK]])


def _past_shape(row: GenerationRow, before: GenerationRow | None) -> PastShape:
    """`before`: the previous training generation."""
    ended_at = row.ended_at or row.created_at
    morph_s = None
    if row.resumed_step and row.seconds_without_progress is not None:  # one that starts at 0 waited for other things
        waited_s = 0.0 if before is None or before.ended_at is None else row.created_at - before.ended_at
        one_s = Plan.from_document(row.plan).predicted_minibatch_s
        morph_s = max(0.0, row.seconds_without_progress - waited_s - one_s)
    return PastShape(lifetime_s=ended_at - row.created_at, morph_s=morph_s, save_s=row.save_s, in_place=row.in_place)


async def read_lives_summary(session: AsyncSession, now: float) -> LivesSummary:
    """What earlier managers observed of the fleet, from the rows that they wrote."""
    row = VmRow
    query = select(row.created_at, row.notice_deadline, row.history).order_by(row.created_at.desc())
    rows = await session.execute(query.limit(_VMS_LOOKED_BACK))
    return summarize_lives(
        (
            VmLife(
                created_at=created_at,
                states=[(entry["at"], VmState(entry["state"])) for entry in history],
                had_notice=notice_deadline is not None,
            )
            for created_at, notice_deadline, history in rows
        ),
        now,
    )
