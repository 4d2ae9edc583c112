"""How fast a job trains: the one definition of step time and rate, for all that shows them.

Both come from the newest steps of a generation, from the end of one step to the end of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import GenerationRow, JobProgressRow, MetricRow

RECENT_STEPS = 100
"""The number of a generation's newest steps that count."""


@dataclass(frozen=True, kw_only=True)
class StepRate:
    steps: int
    """How many steps it is the mean of."""
    step_s: float
    """From the end of one step to the end of the next."""
    between_s: float
    """The part of `step_s` in which the script was between two steps."""
    examples_per_s: float | None


async def read_generation_rates(session: AsyncSession, job_id: str, numbers: Sequence[int]) -> Mapping[int, StepRate]:
    """By the number of each of these generations that has steps."""
    query = _select_rates().where(GenerationRow.job_id == job_id, GenerationRow.number.in_(numbers))
    return {row.number: _make_rate(row) for row in await session.execute(query)}


async def read_job_rates(session: AsyncSession, job_ids: Sequence[str]) -> Mapping[str, StepRate]:
    """By job, of the newest generation that has made a step."""
    whole = JobProgressRow
    is_newest = (GenerationRow.job_id == whole.job_id) & (GenerationRow.number == whole.stepped)
    query = _select_rates().join(whole, is_newest).where(whole.job_id.in_(job_ids))
    return {row.job_id: _make_rate(row) for row in await session.execute(query)}


def _select_rates() -> Select[*tuple[Any, ...]]:
    """The first step of a generation counts only if it has no others, because everything warms up in it."""
    of, step = GenerationRow, MetricRow
    first = func.coalesce(of.resumed_step, 0) + 1
    is_recent = (
        (step.job_id == of.job_id)
        & (step.step > of.last_step - RECENT_STEPS)
        & (step.step <= of.last_step)
        & (step.generation == of.number)
        & or_(step.step > first, of.last_step == first)
    )
    sums = (func.sum(step.step_s).label("step_s"), func.sum(step.between_s).label("between_s"))
    return (
        select(of.job_id, of.number, func.count().label("steps"), *sums, func.sum(step.examples).label("examples"))
        .join(step, is_recent)
        .group_by(of.job_id, of.number)
    )


def _make_rate(row: Row[*tuple[Any, ...]]) -> StepRate:
    steps, took_s = int(row.steps), float(row.step_s)
    return StepRate(
        steps=steps,
        step_s=took_s / steps,
        between_s=float(row.between_s) / steps,
        examples_per_s=int(row.examples) / took_s if took_s else None,
    )
