"""The queries by which the World reads the store: everything that it holds, or rows by their keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.changes import GenerationKey, WorkerKey
from varuna_manager.db.models import GenerationRow, JobProgressRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.states import TERMINAL_JOB_STATES, VmState
from varuna_manager.world.facts import (
    ALIVE_STATES,
    GenerationFacts,
    GenerationProgress,
    JobFacts,
    VmFacts,
    WorkerFacts,
)

T = TypeVar("T")
_BATCH = 500
"""Keys in one query."""

# Lists the states instead of "not gone", so that an index skips the many VMs that are gone.
NOT_GONE = VmRow.state.in_([state.value for state in VmState if state is not VmState.GONE])
IS_LIVE = JobRow.state.not_in([state.value for state in TERMINAL_JOB_STATES])

# The queries are built once: building one, and its cache key, takes as long as a small result.
_VMS = select(*(VmRow.__table__.c[name] for name in VmFacts._fields)).where(NOT_GONE)
_JOBS = select(*(JobRow.__table__.c[name] for name in JobFacts._fields)).where(IS_LIVE)
_GENERATIONS = select(
    *(GenerationRow.__table__.c[name] for name in (*GenerationFacts._fields, *GenerationProgress._fields))
)
_WORKERS = select(*(WorkerRow.__table__.c[name] for name in WorkerFacts._fields))
_NEWEST = select(JobProgressRow.job_id, JobProgressRow.newest)
NEWEST_OF_LIVE = _NEWEST.where(JobProgressRow.job_id.in_(select(JobRow.id).where(IS_LIVE)))
ALIVE_GENERATIONS = select(WorkerRow.job_id, WorkerRow.generation).where(WorkerRow.state.in_(ALIVE_STATES)).distinct()


async def read_vms(session: AsyncSession, ids: Collection[str] | None = None) -> list[VmFacts]:
    """All VMs that are not gone, or those of these ids."""
    if ids is None:
        return [VmFacts._make(row) for row in await session.execute(_VMS)]
    return [
        VmFacts._make(row)
        for some in split_keys(ids)
        for row in (await session.execute(_VMS.where(VmRow.id.in_(some)))).all()
    ]


async def read_jobs(session: AsyncSession, ids: Collection[str] | None = None) -> list[JobFacts]:
    """All jobs that are not over, or those of these ids."""
    if ids is None:
        return [JobFacts._make(row) for row in await session.execute(_JOBS)]
    return [
        JobFacts._make(row)
        for some in split_keys(ids)
        for row in (await session.execute(_JOBS.where(JobRow.id.in_(some)))).all()
    ]


async def read_newest(session: AsyncSession, job_ids: Collection[str] | None = None) -> set[GenerationKey]:
    """The newest generation of each job that is not over, or of each of these jobs, if it has one."""
    if job_ids is None:
        return {(job_id, number) for job_id, number in await session.execute(NEWEST_OF_LIVE)}
    return {
        (job_id, number)
        for some in split_keys(job_ids)
        for job_id, number in (await session.execute(_NEWEST.where(JobProgressRow.job_id.in_(some)))).all()
    }


async def read_alive_generations(session: AsyncSession) -> set[GenerationKey]:
    """The generations with workers that have not stopped."""
    return {(job_id, number) for job_id, number in await session.execute(ALIVE_GENERATIONS)}


async def read_generations(
    session: AsyncSession, keys: Collection[GenerationKey]
) -> list[tuple[GenerationFacts, GenerationProgress]]:
    found = []
    width = len(GenerationFacts._fields)
    for some in split_keys(keys):
        wanted, query = set(some), at_generations(_GENERATIONS, GenerationRow.job_id, GenerationRow.number, some)
        for row in (await session.execute(query)).all():
            facts, progress = GenerationFacts._make(row[:width]), GenerationProgress._make(row[width:])
            if facts.key in wanted:
                found.append((facts, progress))
    return found


async def read_workers_of(session: AsyncSession, generations: Collection[GenerationKey]) -> list[WorkerFacts]:
    """All workers of these generations."""
    found = []
    for some in split_keys(generations, 100):
        wanted, query = set(some), at_generations(_WORKERS, WorkerRow.job_id, WorkerRow.generation, some)
        workers = [WorkerFacts._make(row) for row in (await session.execute(query)).all()]
        found += [worker for worker in workers if (worker.job_id, worker.generation) in wanted]
    return found


async def read_workers(session: AsyncSession, keys: Collection[WorkerKey]) -> list[WorkerFacts]:
    """These workers, and perhaps others of their generations."""
    generations = {(job_id, number) for job_id, number, _ in keys}
    if len(generations) != 1:
        return await read_workers_of(session, generations)
    query = at_generations(_WORKERS, WorkerRow.job_id, WorkerRow.generation, generations)
    return [
        WorkerFacts._make(row)
        for some in split_keys(rank for _, _, rank in keys)
        for row in (await session.execute(query.where(WorkerRow.rank.in_(some)))).all()
    ]


def at_generations(query: Select[Any], job_id: Any, number: Any, keys: Iterable[GenerationKey]) -> Select[Any]:
    """The rows with these keys, and perhaps others with one's job and another's number.

    Each column has a list of its own, because SQLite looks up pairs by their first column only, and would go through
    all generations of a job.
    """
    ordered = list(keys)
    return query.where(job_id.in_({key[0] for key in ordered}), number.in_({key[1] for key in ordered}))


def split_keys(keys: Iterable[T], size: int = _BATCH) -> Iterator[Sequence[T]]:
    """All keys in order, as many at once as fit in a query."""
    ordered = sorted(keys)  # type: ignore[type-var]
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]
