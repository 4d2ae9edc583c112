"""What one look of the job controller reads of the store: a fixed number of queries, however many VMs and jobs.

Ten thousand VMs are looked at twice a second: rows come as plain columns (an ORM object with its history takes ten
times as long), and nothing is asked for job by job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    TERMINAL_JOB_STATES,
    ExitCause,
    GenerationState,
    StopMode,
    VmState,
    WorkerState,
)

_ALIVE = tuple(state.value for state in WorkerState if state not in STOPPED_WORKER_STATES)
_VM_COLUMNS = [column for column in VmRow.__table__.c if column.name not in ("history", "ref")]
_WORKER_COLUMNS: tuple[Any, ...] = (
    WorkerRow.job_id,
    WorkerRow.generation,
    WorkerRow.rank,
    WorkerRow.vm_id,
    WorkerRow.local_rank,
    WorkerRow.state,
    WorkerRow.cause,
    WorkerRow.exit_code,
    WorkerRow.error_text,
    WorkerRow.stopped_at,
)


_WORKER_STATES = {state.value: state for state in WorkerState}
"""Quicker than `WorkerState(value)`, which matters ten thousand times in a look."""


class WorkerFacts(NamedTuple):
    """A worker's row without its history."""

    job_id: str
    generation: int
    rank: int
    vm_id: str
    local_rank: int
    state: str
    cause: str | None
    exit_code: int | None
    error_text: str | None
    stopped_at: float | None

    @property
    def worker_state(self) -> WorkerState:
        return _WORKER_STATES[self.state]

    @property
    def is_alive(self) -> bool:
        return self.state in _ALIVE

    @property
    def exit_cause(self) -> ExitCause | None:
        return None if self.cause is None else ExitCause(self.cause)


@dataclass(frozen=True)
class GenerationFacts:
    state: GenerationState
    stop_mode: StopMode | None


@dataclass(frozen=True, kw_only=True)
class StoreRows:
    vms: Sequence[Any]
    """All that are not gone: the columns of VmRow, but for its history and ref."""
    jobs: Sequence[JobRow]
    """All that are not over, oldest first."""
    newest: Mapping[str, GenerationRow]
    """The newest generation of each of these jobs that has one, to read only."""
    workers: Mapping[str, tuple[WorkerFacts, ...]]
    """Of those generations, by rank."""
    alive: Sequence[WorkerFacts]
    """Of all jobs and generations: the workers that have not stopped."""
    generations: Mapping[tuple[str, int], GenerationFacts]
    """Those of the workers that have not stopped."""
    ended: Mapping[str, tuple[Any, ...]]
    """By job: what changes whenever something of its ended generations does."""


_IS_LIVE = JobRow.state.not_in([state.value for state in TERMINAL_JOB_STATES])
_LIVE_JOBS = select(JobRow.id).where(_IS_LIVE)

# The queries are made once: making one, and the key that finds its compiled form, takes as long as a small answer.
_VMS = select(*_VM_COLUMNS).where(VmRow.state != VmState.GONE.value)
_JOBS = select(JobRow).where(_IS_LIVE).order_by(JobRow.created_at, JobRow.id)
_ALIVE_WORKERS = select(*_WORKER_COLUMNS).where(WorkerRow.state.in_(_ALIVE))
_NUMBERS = (
    select(GenerationRow.job_id, func.max(GenerationRow.number).label("number"))
    .where(GenerationRow.job_id.in_(_LIVE_JOBS))
    .group_by(GenerationRow.job_id)
    .subquery()
)
_NEWEST = (
    select(GenerationRow)
    .join(_NUMBERS, and_(GenerationRow.job_id == _NUMBERS.c.job_id, GenerationRow.number == _NUMBERS.c.number))
    .options(defer(GenerationRow.candidates), defer(GenerationRow.history))
)
_STOPPED_OF_NEWEST = (
    select(*_WORKER_COLUMNS)
    .join(_NUMBERS, and_(WorkerRow.job_id == _NUMBERS.c.job_id, WorkerRow.generation == _NUMBERS.c.number))
    .where(WorkerRow.state.not_in(_ALIVE))
)
_ENDED = (
    select(
        GenerationRow.job_id,
        func.count(),
        func.max(GenerationRow.ended_at),
        func.sum(GenerationRow.last_step),
        func.sum(GenerationRow.resumed_step),
    )
    .where(GenerationRow.state == GenerationState.ENDED.value, GenerationRow.job_id.in_(_LIVE_JOBS))
    .group_by(GenerationRow.job_id)
)


async def read_rows(session: AsyncSession) -> StoreRows:
    """The rows of one look, from one transaction."""
    vms = (await session.execute(_VMS)).all()
    jobs = (await session.scalars(_JOBS)).all()
    alive = await _workers(session, _ALIVE_WORKERS)
    newest = {row.job_id: row for row in (await session.scalars(_NEWEST)).all()}
    stopped = await _workers(session, _STOPPED_OF_NEWEST)
    return StoreRows(
        vms=vms,
        jobs=jobs,
        newest=newest,
        workers=_by_rank(newest, (*alive, *stopped)),
        alive=alive,
        generations=await _generations(session, newest, alive),
        ended={job_id: tuple(rest) for job_id, *rest in (await session.execute(_ENDED)).all()},
    )


async def _workers(session: AsyncSession, query: Select[Any]) -> list[WorkerFacts]:
    return list(map(WorkerFacts._make, (await session.execute(query)).all()))


def _by_rank(newest: Mapping[str, GenerationRow], workers: Sequence[WorkerFacts]) -> dict[str, tuple[WorkerFacts, ...]]:
    """One that stopped between the two queries is in both: the later row counts."""
    numbers = {job_id: row.number for job_id, row in newest.items()}
    found: dict[str, dict[int, WorkerFacts]] = {job_id: {} for job_id in newest}
    for worker in workers:
        if numbers.get(worker.job_id) == worker.generation:
            found[worker.job_id][worker.rank] = worker
    return {job_id: tuple(ranks[rank] for rank in sorted(ranks)) for job_id, ranks in found.items()}


async def _generations(
    session: AsyncSession, newest: Mapping[str, GenerationRow], alive: Sequence[WorkerFacts]
) -> dict[tuple[str, int], GenerationFacts]:
    known = {
        (row.job_id, row.number): GenerationFacts(row.generation_state, row.mode_of_stop) for row in newest.values()
    }
    others = {(worker.job_id, worker.generation) for worker in alive} - known.keys()
    if others:
        row = GenerationRow
        query = select(row.job_id, row.number, row.state, row.stop_mode)
        query = query.where(tuple_(row.job_id, row.number).in_(sorted(others)))
        for job_id, number, state, mode in (await session.execute(query)).all():
            facts = GenerationFacts(GenerationState(state), None if mode is None else StopMode(mode))
            known[(job_id, number)] = facts
    return known
