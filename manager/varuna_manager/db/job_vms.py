"""Keeps what a job's generations have used of each VM (`JobVmRow`).

Each generation is added once, after it has ended, in the order of their numbers. `JobProgressRow.billed` is the last
one added; readers add the later ones themselves. These are the running generation, and any that were written without
the ORM.
"""

from __future__ import annotations

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

_LAST_ENDED = """
    SELECT coalesce(min(CASE WHEN ended_at IS NULL THEN number END) - 1, max(number))
    FROM generations WHERE generations.job_id = job_progress.job_id AND number > billed
"""
"""The last generation before the first that has not ended; null: there is none after the billed ones."""

_ADD = text("""
    INSERT INTO job_vms (job_id, vm_id, gpu_seconds)
    SELECT generations.job_id, vm_id,
           sum(CASE WHEN ended_at > generations.created_at THEN ended_at - generations.created_at ELSE 0 END)
    FROM generations JOIN workers ON workers.job_id = generations.job_id AND workers.generation = generations.number
    WHERE generations.job_id = :job_id AND number > :billed AND number <= :last
    GROUP BY generations.job_id, vm_id
    ON CONFLICT (job_id, vm_id) DO UPDATE SET gpu_seconds = job_vms.gpu_seconds + excluded.gpu_seconds
""")
_FIND = text(f"SELECT billed, ({_LAST_ENDED}) AS last FROM job_progress WHERE job_id = :job_id")
_NOTE = text("UPDATE job_progress SET billed = :last WHERE job_id = :job_id")


def bill_ended(connection: Connection, job_id: str) -> None:
    """Add the generations that have ended since the last call. The job must have a row of progress."""
    found = connection.execute(_FIND, {"job_id": job_id}).one()
    if found.last is not None and found.last > found.billed:
        connection.execute(_ADD, {"job_id": job_id, "billed": found.billed, "last": found.last})
        connection.execute(_NOTE, {"job_id": job_id, "last": found.last})


async def bill_all(session: AsyncSession) -> None:
    """Rebuild the rows from the generations. The rows of progress must exist and have nothing billed."""
    await session.execute(text("DELETE FROM job_vms"))
    await session.run_sync(_bill_each)


def _bill_each(session: Session) -> None:
    for job_id in session.scalars(text("SELECT job_id FROM job_progress")).all():
        bill_ended(session.connection(), job_id)
