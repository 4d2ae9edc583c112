"""The World: what decisions look at, in memory.

Only the leader writes, and only through its Database; so the World is read from the store once, and then follows each
transaction: what that has changed is read again within it, and becomes part of the World with its commit. When it is
not known whether a transaction was committed, the World is dropped and read again as a whole, as after a restart.

What agents report each second is not in the store: it is in the VmRegistry, and joins the rows in the views of VMs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.changes import ChangedRows, GenerationKey
from varuna_manager.db.engine import Database
from varuna_manager.domain.commands import GenerationOnVm
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.spec import read_spec
from varuna_manager.domain.states import GenerationState
from varuna_manager.world import reading
from varuna_manager.world.facts import (
    GenerationFacts,
    GenerationProgress,
    HeldGeneration,
    JobFacts,
    StoredJob,
    VmFacts,
    WorkerFacts,
    WorkerGroup,
)
from varuna_manager.world.pasts import JobPast, read_past
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.vm_views import VmViews
from varuna_proto.plan import Device

T = TypeVar("T")
NO_PAST = JobPast()


@dataclass(frozen=True)
class HeldGenerations:
    """The newest generation of every job that is not over, and every other with workers that have not stopped."""

    by_key: Mapping[GenerationKey, HeldGeneration]

    @cached_property
    def newest(self) -> Mapping[str, HeldGeneration]:
        """By job, the newest of these."""
        return {job_id: self.by_key[job_id, number] for job_id, number in dict(sorted(self.by_key)).items()}

    @cached_property
    def busy(self) -> Mapping[str, int]:
        """How many workers have not stopped, by VM; 0 for any other VM."""
        busy: Counter[str] = Counter()
        for held in self.by_key.values():
            busy.update({vm_id: len(states) for vm_id, states in held.group.alive_on.items()})
        return busy

    @cached_property
    def occupied(self) -> Mapping[Device, str]:
        """Devices of workers that have not stopped, and the job's id."""
        return {device: job_id for held in self.by_key.values() for device, job_id in held.group.occupied.items()}

    @cached_property
    def presence(self) -> Mapping[str, tuple[GenerationOnVm, ...]]:
        """By VM, every generation with a worker there that has not stopped."""
        found: dict[str, tuple[GenerationOnVm, ...]] = {}
        for held in self.by_key.values():
            twice = {vm_id: (*found[vm_id], *held.presence[vm_id]) for vm_id in found.keys() & held.presence.keys()}
            found.update(held.presence)
            found.update(twice)
        return found


@dataclass(frozen=True, kw_only=True)
class StoreContents:
    """What decisions need from the store, as of one commit."""

    vms: Mapping[str, VmFacts]
    """All VMs that are not gone."""
    jobs: Mapping[str, StoredJob]
    """All jobs that are not over, oldest first."""
    generations: HeldGenerations
    progress: Mapping[GenerationKey, GenerationProgress]
    """Of the same generations."""
    pasts: Mapping[str, JobPast]
    """By job."""


@dataclass(frozen=True, kw_only=True)
class WorldView(StoreContents):
    """The World at one moment."""

    vm_views: Mapping[str, VmView]
    """All VMs that are not gone."""

    def find_past(self, job_id: str) -> JobPast:
        return self.pasts.get(job_id, NO_PAST)


@dataclass(frozen=True, kw_only=True)
class _RowNews:
    """The new contents of the rows that a transaction has changed."""

    changed: ChangedRows
    vms: Sequence[VmFacts]
    jobs: Sequence[JobFacts]
    generations: Sequence[tuple[GenerationFacts, GenerationProgress]]
    workers: Sequence[WorkerFacts]
    pasts: Mapping[str, JobPast]


class World:
    """`now`: the wall clock, for the ages of VMs."""

    def __init__(self, database: Database, registry: VmRegistry, now: Callable[[], float] = time.time) -> None:
        self.registry = registry
        self._database = database
        self._views = VmViews(registry, now)
        self._contents: StoreContents | None = None
        self._viewing = asyncio.Lock()
        self._log = structlog.get_logger("varuna.world")
        database.add_mirror(self)

    async def load_view(self) -> WorldView:
        """The World now. Raises StoreAwayError if it has to be read from the store and cannot be."""
        async with self._viewing:
            contents = self._contents or await self._load()
            views = await self._views.update_views(contents.vms, contents.generations.busy)
        return WorldView(**vars(contents), vm_views=views)

    async def _load(self) -> StoreContents:
        async with self._database.read_alone() as session:
            self._contents = contents = await _read_contents(session)
        return contents

    # ------------------------------------------------------------ following the store

    def drop_contents(self) -> None:
        self._contents = None

    def check_version(self, held: JobFacts | VmFacts, version: int) -> None:
        """`version`: of this row in the store, seen within a transaction.

        Drops the World when it still holds another version, because then another process has written to the store.
        """
        contents = self._contents
        if contents is None or version == held.version:
            return
        if isinstance(held, VmFacts):
            is_held = contents.vms.get(held.id) is held
        else:
            is_held = held.id in contents.jobs and contents.jobs[held.id].row is held
        if is_held:
            self._log.warning("another process has written to the store: reading it again", row=held.id)
            self.drop_contents()

    async def read_changes(self, session: AsyncSession, changed: ChangedRows) -> Callable[[], None]:
        contents = self._contents
        if contents is None:
            return lambda: None
        jobs = await reading.read_jobs(session, changed.jobs)
        # The World did not hold a job that was over, and so not its newest generation either.
        resumed = await reading.read_newest(session, {job.id for job in jobs} - contents.jobs.keys())
        generations = await reading.read_generations(session, changed.generations | resumed)
        workers = await reading.read_workers_of(session, resumed) if resumed else []
        news = _RowNews(
            changed=changed,
            vms=await reading.read_vms(session, changed.vms),
            jobs=jobs,
            generations=generations,
            workers=[*workers, *await reading.read_workers(session, changed.workers)],
            pasts=await _read_pasts(
                session,
                [*[job.row for job in contents.jobs.values() if job.row.id not in changed.jobs], *jobs],
                {facts.job_id for facts, _ in generations if _is_ended(facts)} | {job_id for job_id, _ in resumed},
            ),
        )
        return partial(self._apply, news)

    def _apply(self, news: _RowNews) -> None:
        contents = self._contents
        if contents is None:
            return
        if news.changed.vms:
            contents = replace(contents, vms=_with(contents.vms, news.changed.vms, {vm.id: vm for vm in news.vms}))
        if news.changed.jobs:
            stored = {job.id: StoredJob(job, *read_spec(job.spec)) for job in news.jobs}
            contents = replace(contents, jobs=_in_order(_with(contents.jobs, news.changed.jobs, stored)))
        if news.changed.jobs or news.generations or news.workers:
            contents = _with_generations(contents, news)
        self._contents = contents


async def _read_contents(session: AsyncSession) -> StoreContents:
    vms = {vm.id: vm for vm in await reading.read_vms(session)}
    rows = await reading.read_jobs(session)
    keys = await reading.read_newest(session) | await reading.read_alive_generations(session)
    generations = await reading.read_generations(session, keys)
    workers = _by_generation(await reading.read_workers_of(session, keys))
    return StoreContents(
        vms=vms,
        jobs=_in_order({row.id: StoredJob(row, *read_spec(row.spec)) for row in rows}),
        generations=HeldGenerations(
            {facts.key: HeldGeneration(facts, WorkerGroup(workers.get(facts.key, ()))) for facts, _ in generations}
        ),
        progress={facts.key: progress for facts, progress in generations},
        pasts=await _read_pasts(
            session, rows, {facts.job_id for facts, _ in generations if _is_ended(facts) or facts.number > 1}
        ),
    )


async def _read_pasts(
    session: AsyncSession, jobs: Iterable[JobFacts], job_ids: Collection[str]
) -> Mapping[str, JobPast]:
    """Read the pasts of the jobs with these ids."""
    return {job.id: await read_past(session, job.id, job.retried_after) for job in jobs if job.id in job_ids}


def _is_ended(facts: GenerationFacts) -> bool:
    return facts.generation_state is GenerationState.ENDED


def _with_generations(contents: StoreContents, news: _RowNews) -> StoreContents:
    """With the generations, workers and pasts of the news, and without those of jobs that are over."""
    by_key, progress = dict(contents.generations.by_key), dict(contents.progress)
    workers = _by_generation(news.workers)
    for facts, progressed in news.generations:
        held = by_key.get(facts.key)
        group = WorkerGroup(()) if held is None else held.group
        progress[facts.key] = progressed
        if held is None or held.facts != facts:
            by_key[facts.key] = HeldGeneration(facts, group)
    for key, changed in workers.items():
        if (held := by_key.get(key)) is not None:
            ranks = {worker.rank: worker for worker in held.group.all} | {worker.rank: worker for worker in changed}
            by_key[key] = HeldGeneration(held.facts, WorkerGroup(ranks.values()))
    newest = dict(sorted(by_key))  # of a job's numbers the last, which is the greatest
    kept = {
        (job_id, number)
        for (job_id, number), held in by_key.items()
        if held.group.alive_on or (job_id in contents.jobs and newest[job_id] == number)
    }
    by_key = {key: held for key, held in by_key.items() if key in kept}
    is_same = by_key.keys() == contents.generations.by_key.keys() and all(
        held is contents.generations.by_key[key] for key, held in by_key.items()
    )
    return replace(
        contents,
        generations=contents.generations if is_same else HeldGenerations(by_key),
        progress={key: progressed for key, progressed in progress.items() if key in kept},
        pasts={job_id: past for job_id, past in {**contents.pasts, **news.pasts}.items() if job_id in contents.jobs},
    )


def _with(rows: Mapping[str, T], changed: Collection[str], present: Mapping[str, T]) -> dict[str, T]:
    """The rows with the changed ones as they are now. Changed rows that are not present are dropped."""
    kept = rows if present.keys() >= set(changed) else {key: row for key, row in rows.items() if key not in changed}
    return {**kept, **present}


def _in_order(jobs: Mapping[str, StoredJob]) -> dict[str, StoredJob]:
    """Oldest first."""
    return dict(sorted(jobs.items(), key=lambda item: (item[1].row.created_at, item[0])))


def _by_generation(workers: Iterable[WorkerFacts]) -> Mapping[GenerationKey, Sequence[WorkerFacts]]:
    found: dict[GenerationKey, list[WorkerFacts]] = {}
    for worker in workers:
        found.setdefault((worker.job_id, worker.generation), []).append(worker)
    return found
