"""What one look of the job controller reads of the store: a fixed number of queries, however many VMs and jobs.

Ten thousand VMs are looked at twice a second, and little of what the store has of them changes from look to look. So a
look asks what has changed, and reads only that: rows of VMs, jobs and generations by their versions; a generation's
workers by how many of them are in which state, for a worker only ever goes forward, and nothing of its row that a look
needs changes without its state. What is remembered may be lost at any time: it is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import and_, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from varuna_manager.db.models import GenerationRow, JobProgressRow, JobRow, WorkerRow
from varuna_manager.domain.observed import Device
from varuna_manager.domain.spec import JobSpec, read_spec
from varuna_manager.domain.states import (
    STOPPED_WORKER_STATES,
    TERMINAL_JOB_STATES,
    ExitCause,
    GenerationState,
    StopMode,
    WorkerState,
)
from varuna_manager.services.fleet import workers_by_vm
from varuna_manager.services.vm_rows import VmFacts, VmRows

_ALIVE = frozenset(state.value for state in WorkerState if state not in STOPPED_WORKER_STATES)
_STOPPED = frozenset(state.value for state in STOPPED_WORKER_STATES)
_WORKER_STATES = {state.value: state for state in WorkerState}
"""Quicker than `WorkerState(value)`, which matters ten thousand times in a look."""
_AT_ONCE = 100
"""Jobs or generations in one query."""

T = TypeVar("T")
GenerationKey = tuple[str, int]
"""Job and number."""


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
    unreached: int | None
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


class Workers:
    """All workers of one generation. Never changed: where one of them is another now, this is another object."""

    def __init__(self, counts: Mapping[str, int], workers: Iterable[WorkerFacts]) -> None:
        self.counts = counts
        """By state, before the rows were read."""
        self.all = tuple(sorted(workers, key=lambda worker: worker.rank))
        self.occupied = {
            Device(worker.vm_id, worker.local_rank): worker.job_id for worker in self.all if worker.is_alive
        }
        """Devices of those that have not stopped."""
        self.alive_on: dict[str, tuple[WorkerState, ...]] = {}
        """The states of those that have not stopped, by VM."""
        for worker in self.all:
            if worker.is_alive:
                self.alive_on[worker.vm_id] = (*self.alive_on.get(worker.vm_id, ()), worker.worker_state)


@dataclass(frozen=True)
class StoredJob:
    row: JobRow
    """Detached, to read only."""
    spec: JobSpec
    flaw: str
    """Why the spec cannot be used; empty: it can."""


class Progress(NamedTuple):
    """What is written of a generation without raising its version."""

    last_step: int | None
    last_step_at: float | None


class GenerationFacts(NamedTuple):
    state: GenerationState
    stop_mode: StopMode | None


@dataclass(frozen=True, kw_only=True)
class StoreRows:
    vms: Mapping[str, VmFacts]
    """All that are not gone."""
    jobs: Sequence[StoredJob]
    """All that are not over, oldest first."""
    newest: Mapping[str, GenerationRow]
    """The newest generation of each of these jobs that has one: detached, with what a look needs to read of it."""
    progress: Mapping[str, Progress]
    """Theirs, by job."""
    workers: Mapping[GenerationKey, Workers]
    """Of those generations, and of every other that has workers which have not stopped."""
    generations: Mapping[GenerationKey, GenerationFacts]
    """The same generations."""
    ended: Mapping[str, int]
    """By job: how often something of its ended generations has changed; missing where none has ended."""


_IS_LIVE = JobRow.state.not_in([state.value for state in TERMINAL_JOB_STATES])
_LIVE_JOBS = select(JobRow.id).where(_IS_LIVE)

# The queries are made once: making one, and the key that finds its compiled form, takes as long as a small answer.
_JOB_VERSIONS = select(JobRow.id, JobRow.version).where(_IS_LIVE).order_by(JobRow.created_at, JobRow.id)
_IS_NEWEST = and_(GenerationRow.job_id == JobProgressRow.job_id, GenerationRow.number == JobProgressRow.newest)
_NEWEST = (
    select(
        GenerationRow.id,
        GenerationRow.job_id,
        GenerationRow.version,
        GenerationRow.last_step,
        GenerationRow.last_step_at,
        JobProgressRow.changes,
    )
    .join(JobProgressRow, _IS_NEWEST)
    .where(JobProgressRow.job_id.in_(_LIVE_JOBS))
)
_LOOKED_AT = load_only(
    GenerationRow.job_id,
    GenerationRow.number,
    GenerationRow.kind,
    GenerationRow.state,
    GenerationRow.plan,
    GenerationRow.rendezvous_host,
    GenerationRow.rendezvous_port,
    GenerationRow.secret,
    GenerationRow.committed_step,
    GenerationRow.created_at,
    GenerationRow.end_reason,
    GenerationRow.stop_mode,
    GenerationRow.stop_cause,
    GenerationRow.stop_reason,
    GenerationRow.stop_requested_at,
    GenerationRow.version,
    raiseload=True,  # the others are large, or change without the version
)
_COUNT = select(WorkerRow.job_id, WorkerRow.generation, WorkerRow.state, func.count()).group_by(
    WorkerRow.job_id, WorkerRow.generation, WorkerRow.state
)
_COUNT_ALIVE = _COUNT.where(WorkerRow.state.in_(_ALIVE))
# By pairs, and no join: SQLite would begin that with the workers of all generations.
_COUNT_STOPPED = _COUNT.where(
    WorkerRow.state.in_(_STOPPED),
    tuple_(WorkerRow.job_id, WorkerRow.generation).in_(
        select(JobProgressRow.job_id, JobProgressRow.newest).where(JobProgressRow.job_id.in_(_LIVE_JOBS))
    ),
)
_WORKERS = select(*(WorkerRow.__table__.c[name] for name in WorkerFacts._fields))


class BusyVms:
    """How many workers have not stopped, by VM. Remembers what it has read; for one reader at a time."""

    def __init__(self) -> None:
        self._counts: Sequence[Any] = ()
        self._busy: Mapping[str, int] = {}

    async def read(self, session: AsyncSession) -> Mapping[str, int]:
        """0 for a VM that is not among them. The same object for as long as no worker starts or stops."""
        counts = (await session.execute(_COUNT_ALIVE)).all()
        if counts != self._counts:
            self._counts, self._busy = counts, await workers_by_vm(session)
        return self._busy


class StoreReader:
    """Remembers what it has read. For one reader at a time."""

    def __init__(self) -> None:
        self._vms = VmRows()
        self._jobs: dict[str, StoredJob] = {}
        self._newest: dict[str, GenerationRow] = {}
        self._workers: dict[GenerationKey, Workers] = {}

    async def read(self, session: AsyncSession) -> StoreRows:
        """The rows of one look, from one session."""
        vms = await self._vms.read(session)
        await self._read_jobs(session)
        progress, ended = await self._read_newest(session)
        await self._read_workers(session)
        return StoreRows(
            vms=vms,
            jobs=tuple(self._jobs.values()),
            newest=self._newest,
            progress=progress,
            workers=self._workers,
            generations=await self._generations(session),
            ended=ended,
        )

    async def _read_jobs(self, session: AsyncSession) -> None:
        versions: dict[str, int] = dict((await session.execute(_JOB_VERSIONS)).all())
        known = {job_id: job for job_id, job in self._jobs.items() if job.row.version == versions.get(job_id)}
        for ids in _some([job_id for job_id in versions if job_id not in known]):
            # A job that ended between the queries is over: it is left out.
            for row in (await session.scalars(select(JobRow).where(_IS_LIVE, JobRow.id.in_(ids)))).all():
                known[row.id] = StoredJob(row, *read_spec(row.spec))
        self._jobs = {job_id: known[job_id] for job_id in versions if job_id in known}

    async def _read_newest(self, session: AsyncSession) -> tuple[dict[str, Progress], dict[str, int]]:
        """(the progress of each job's newest generation, how often something of its ended ones has changed)."""
        found = [row for row in (await session.execute(_NEWEST)).all() if row[1] in self._jobs]
        known = {row.id: row for row in self._newest.values()}
        changed = [id for id, _, version, *_ in found if id not in known or known[id].version != version]
        for ids in _some(changed):
            query = select(GenerationRow).where(GenerationRow.id.in_(ids)).options(_LOOKED_AT)
            known |= {row.id: row for row in (await session.scalars(query)).all()}
        self._newest = {job_id: known[id] for id, job_id, *_ in found}
        progress = {job_id: Progress(step, at) for _, job_id, _, step, at, _ in found}
        return progress, {job_id: changes for _, job_id, *_, changes in found if changes}

    async def _read_workers(self, session: AsyncSession) -> None:
        """After the generations: whoever is of them is in the store."""
        counts: dict[GenerationKey, dict[str, int]] = {(id, row.number): {} for id, row in self._newest.items()}
        for query in (_COUNT_ALIVE, _COUNT_STOPPED):
            for job_id, number, state, count in (await session.execute(query)).all():
                counts.setdefault((job_id, number), {})[state] = count
        known = {key: workers for key, workers in self._workers.items() if workers.counts == counts.get(key)}
        for keys in _some([key for key in counts if key not in known]):
            query = _WORKERS.where(tuple_(WorkerRow.job_id, WorkerRow.generation).in_(keys))
            rows: dict[GenerationKey, list[WorkerFacts]] = {key: [] for key in keys}
            for worker in map(WorkerFacts._make, (await session.execute(query)).all()):
                rows[worker.job_id, worker.generation].append(worker)
            known |= {key: Workers(counts[key], found) for key, found in rows.items()}
        self._workers = {key: known[key] for key in counts}

    async def _generations(self, session: AsyncSession) -> dict[GenerationKey, GenerationFacts]:
        known = {
            (job_id, row.number): GenerationFacts(row.generation_state, row.mode_of_stop)
            for job_id, row in self._newest.items()
        }
        for keys in _some(sorted(self._workers.keys() - known.keys())):
            row = GenerationRow
            query = select(row.job_id, row.number, row.state, row.stop_mode)
            query = query.where(tuple_(row.job_id, row.number).in_(keys))
            for job_id, number, state, mode in (await session.execute(query)).all():
                facts = GenerationFacts(GenerationState(state), None if mode is None else StopMode(mode))
                known[(job_id, number)] = facts
        return known


def _some(wanted: Sequence[T]) -> Iterator[Sequence[T]]:
    """All of them, as many at once as fit a query."""
    for first in range(0, len(wanted), _AT_ONCE):
        yield wanted[first : first + _AT_ONCE]
