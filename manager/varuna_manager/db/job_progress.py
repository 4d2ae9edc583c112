"""Keeps the totals of a job's generations in one row (`JobProgressRow`), in the transaction that changes them.

Each change adds to the row by one statement, so that it costs the same for the first generation and the ten thousandth.
Changes of generations through the ORM are detected automatically; a plain UPDATE of progress needs a call of
`note_progress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Insert, case, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapper

from varuna_manager.db.job_vms import bill_all, bill_ended
from varuna_manager.db.models import Base, GenerationRow, JobProgressRow
from varuna_manager.domain.states import GenerationKind, GenerationState

_TABLE = Base.metadata.tables[JobProgressRow.__tablename__]
_LARGEST = ("newest", "trained", "stepped", "step", "step_at")
_SUMS = ("stalled_s", "steps_redone", "changes")
_NOTHING = dict.fromkeys((*_LARGEST, *_SUMS), 0)


def _upsert(insert: Any) -> Insert:
    statement = insert(_TABLE)

    def larger(name: str) -> ColumnElement[Any]:
        old, new = _TABLE.c[name], statement.excluded[name]
        return case((new > old, new), else_=old)

    sets: dict[str, Any] = {name: larger(name) for name in _LARGEST}
    sets |= {name: _TABLE.c[name] + statement.excluded[name] for name in _SUMS}
    made: Insert = statement.on_conflict_do_update(index_elements=["job_id"], set_=sets)
    return made


# Built once: building one takes as long as executing it.
_UPSERTS: Mapping[str, Insert] = {"sqlite": _upsert(sqlite.insert), "postgresql": _upsert(postgresql.insert)}

SUM_UP = """
    INSERT INTO job_progress
        (job_id, newest, trained, stepped, step, step_at, stalled_s, steps_redone, changes, billed)
    SELECT job_id, max(number), coalesce(max(CASE WHEN kind = 'training' THEN number END), 0),
           coalesce(max(CASE WHEN last_step IS NOT NULL THEN number END), 0),
           coalesce(max(coalesce(last_step, resumed_step)), 0),
           coalesce(max(last_step_at), 0), coalesce(sum(seconds_without_progress), 0), coalesce(sum(steps_redone), 0),
           count(CASE WHEN state = 'ended' THEN 1 END), 0
    FROM generations GROUP BY job_id
"""


async def sum_up_all(session: AsyncSession) -> None:
    """Rebuild the rows from the generations, after these were written without the ORM."""
    await session.execute(_TABLE.delete())
    await session.execute(text(SUM_UP))
    await bill_all(session)


async def note_progress(session: AsyncSession, generation: GenerationRow, values: Mapping[str, Any]) -> None:
    """Add the progress that an UPDATE wrote to the generation (`values`), step by step."""
    noted: dict[str, Any] = {
        "stalled_s": values.get("seconds_without_progress") or 0.0,
        "steps_redone": values.get("steps_redone") or 0,
        "changes": int(generation.state == GenerationState.ENDED),
    }
    if values.get("last_step") is not None:
        noted |= {"stepped": generation.number, "step": values["last_step"], "step_at": values.get("last_step_at") or 0}
    elif values.get("resumed_step") is not None:
        noted["step"] = values["resumed_step"]
    await session.execute(_UPSERTS[session.get_bind().dialect.name], _row(generation, noted))


def _row(generation: GenerationRow, noted: Mapping[str, Any]) -> dict[str, Any]:
    is_training = generation.kind == GenerationKind.TRAINING
    numbers = {"newest": generation.number, "trained": generation.number if is_training else 0}
    return {"job_id": generation.job_id, **_NOTHING, **numbers, **noted}


@event.listens_for(GenerationRow, "after_insert")
def _note_new(mapper: Mapper[Any], connection: Connection, generation: GenerationRow) -> None:
    has_stepped = generation.last_step is not None
    noted = {
        "stepped": generation.number if has_stepped else 0,
        "step": generation.last_step or generation.resumed_step or 0,
        "step_at": generation.last_step_at or 0.0,
        "stalled_s": generation.seconds_without_progress or 0.0,
        "steps_redone": generation.steps_redone or 0,
        "changes": int(generation.state == GenerationState.ENDED),
    }
    connection.execute(_UPSERTS[connection.dialect.name], _row(generation, noted))


@event.listens_for(GenerationRow, "after_update")
def _note_change(mapper: Mapper[Any], connection: Connection, generation: GenerationRow) -> None:
    if generation.state == GenerationState.ENDED:
        connection.execute(_UPSERTS[connection.dialect.name], _row(generation, {"changes": 1}))
        bill_ended(connection, generation.job_id)
