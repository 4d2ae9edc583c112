"""The moments and steps of a job's generations, from which `account_time` says where its time went."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import GenerationRow
from varuna_manager.domain.accounting import GenerationTimes
from varuna_manager.domain.states import GenerationKind

_COLUMNS = [
    GenerationRow.number,
    GenerationRow.kind,
    GenerationRow.plan,
    GenerationRow.created_at,
    GenerationRow.started_at,
    GenerationRow.last_step_at,
    GenerationRow.ended_at,
    GenerationRow.resumed_step,
    GenerationRow.last_step,
    GenerationRow.between_s,
]
GenerationRecord = Row[*tuple[Any, ...]]
_SETTLED_S = 600.0
"""So long after its end a generation's row no longer changes; late reports have arrived by then."""


async def read_generation_records(session: AsyncSession, job_id: str, after: int = 0) -> Sequence[GenerationRecord]:
    """The generations with numbers above `after`, oldest first."""
    query = select(*_COLUMNS).where(GenerationRow.job_id == job_id, GenerationRow.number > after)
    return (await session.execute(query.order_by(GenerationRow.number))).all()


def make_generation_times(
    records: Sequence[GenerationRecord], bubble_shares: Mapping[int, float], best_before: int = 0
) -> list[GenerationTimes]:
    """`best_before`: the newest step that generations before these have completed."""
    best = itertools.accumulate((record.last_step or 0 for record in records), max, initial=best_before)
    return [
        GenerationTimes(
            number=record.number,
            kind=GenerationKind(record.kind),
            created_at=record.created_at,
            first_step_at=record.started_at,
            last_step_at=record.last_step_at,
            ended_at=record.ended_at,
            steps=count_steps(record),
            redone=max(min(record.last_step or 0, before) - (record.resumed_step or 0), 0),
            bubble_share=bubble_shares.get(record.number, 0.0),
            between_s=record.between_s or {},
        )
        for record, before in zip(records, best, strict=False)
    ]


def count_steps(record: GenerationRecord) -> int:
    return 0 if record.last_step is None else int(record.last_step - (record.resumed_step or 0))


class GenerationTimesCache:
    """Reads one job's generations again and again, but each that has settled only once. It knows no bubbles."""

    def __init__(self) -> None:
        self._settled: list[GenerationTimes] = []
        self._best = 0

    async def read_times(self, session: AsyncSession, job_id: str, now: float) -> list[GenerationTimes]:
        after = self._settled[-1].number if self._settled else 0
        records = await read_generation_records(session, job_id, after)
        times = make_generation_times(records, {}, self._best)
        settled = [record for record in records if record.ended_at is not None and record.ended_at < now - _SETTLED_S]
        found = [*self._settled, *times]
        # Only the newest generation can be running, so those that have settled come first.
        self._settled += times[: len(settled)]
        self._best = max([self._best, *(record.last_step or 0 for record in settled)])
        return found
