"""Keeps what a job's generations have used of each VM (`JobVmRow`).

Each generation is added once, after it has ended, in the order of their numbers. `JobProgressRow.billed` is the last
one added; readers add the later ones themselves. These are the running generation, and any that were written without
the ORM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Insert, bindparam, case, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from varuna_manager.db.models import Base, GenerationRow, JobVmRow, VmRow, WorkerRow
from varuna_manager.db.vm_prices import sum_price_changes

_TABLE = Base.metadata.tables[JobVmRow.__tablename__]
_SUMS = ("gpu_seconds", "priced_gpu_seconds", "seconds_times_price")
_LAST_ENDED = """
    SELECT coalesce(min(CASE WHEN ended_at IS NULL THEN number END) - 1, max(number))
    FROM generations WHERE generations.job_id = job_progress.job_id AND number > billed
"""
"""The last generation before the first that has not ended; null: there is none after the billed ones."""

_FIND = text(f"SELECT billed, ({_LAST_ENDED}) AS last FROM job_progress WHERE job_id = :job_id")
_NOTE = text("UPDATE job_progress SET billed = :last WHERE job_id = :job_id")


def _add_use(insert: Any) -> Insert:
    """Parameters: `job_id`, `billed`, `last`."""
    begins, ends, price = GenerationRow.created_at, GenerationRow.ended_at, VmRow.price_per_hour
    seconds = case((ends > begins, ends - begins), else_=0.0)
    sums = (
        func.sum(seconds),
        func.sum(case((price.is_(None), 0.0), else_=seconds)),
        func.sum(seconds * func.coalesce(price, 0.0) + sum_price_changes(begins, ends)),
    )
    numbers = (GenerationRow.number > bindparam("billed"), GenerationRow.number <= bindparam("last"))
    used = (
        select(GenerationRow.job_id, WorkerRow.vm_id, *sums)
        .join(WorkerRow, (WorkerRow.job_id == GenerationRow.job_id) & (WorkerRow.generation == GenerationRow.number))
        .outerjoin(VmRow, VmRow.id == WorkerRow.vm_id)
        .where(GenerationRow.job_id == bindparam("job_id"), *numbers)
        .group_by(GenerationRow.job_id, WorkerRow.vm_id)
    )
    statement = insert(_TABLE).from_select(["job_id", "vm_id", *_SUMS], used)
    sets = {name: _TABLE.c[name] + statement.excluded[name] for name in _SUMS}
    made: Insert = statement.on_conflict_do_update(index_elements=["job_id", "vm_id"], set_=sets)
    return made


# Built once: building one takes as long as executing it.
_ADD: Mapping[str, Insert] = {"sqlite": _add_use(sqlite.insert), "postgresql": _add_use(postgresql.insert)}


def bill_ended(connection: Connection, job_id: str) -> None:
    """Add the generations that have ended since the last call. The job must have a row of progress."""
    found = connection.execute(_FIND, {"job_id": job_id}).one()
    if found.last is not None and found.last > found.billed:
        add = _ADD[connection.dialect.name]
        connection.execute(add, {"job_id": job_id, "billed": found.billed, "last": found.last})
        connection.execute(_NOTE, {"job_id": job_id, "last": found.last})


async def bill_all(session: AsyncSession) -> None:
    """Rebuild the rows from the generations. The rows of progress must exist and have nothing billed."""
    await session.execute(text("DELETE FROM job_vms"))
    await session.run_sync(_bill_each)


def _bill_each(session: Session) -> None:
    for job_id in session.scalars(text("SELECT job_id FROM job_progress")).all():
        bill_ended(session.connection(), job_id)
