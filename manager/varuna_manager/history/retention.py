"""Deletes what ended long enough ago, in small batches so that no other writer waits long.

`delete_some` deletes one batch of one kind in one transaction of the leader (so under its fence, like all writes). The
size of a batch follows from the duration of the last one. Rows to delete are found by reading; the transaction checks
only these rows again. Deletion resumes wherever it was interrupted, and nothing is half visible: a job is hidden before
its rows go, and its own row goes last.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import structlog
from sqlalchemy import ColumnElement, CursorResult, Text, and_, cast, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from varuna_manager.db.changes import name_changes
from varuna_manager.db.engine import Database, NotLeaderError, StoreAwayError
from varuna_manager.db.models import (
    ArchiveRow,
    CheckpointRow,
    EnrolmentRow,
    EventRow,
    FleetDayRow,
    GenerationRow,
    JobProgressRow,
    JobRow,
    JobVmRow,
    LoggedValueRow,
    MetricBlockRow,
    MetricRow,
    StackRow,
    TokenRow,
    TraceRow,
    VmPriceRow,
    VmRow,
    VmUsageRow,
    WorkerRow,
)
from varuna_manager.domain.access import BY_MANAGER
from varuna_manager.domain.retention import GoneVm, KeepDays, PastPrice, choose_batch_size, find_horizon, sum_up_by_day
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.jobs.jobs import ALIVE, IS_KEPT, JOB_DELETED, OVER, mark_deleted
from varuna_manager.providers.base import EmulatedProvider
from varuna_manager.world.events import EventLog
from varuna_manager.world.reading import NOT_GONE

_PAUSE_S = 0.25
"""Between batches of some 50 ms, so that the writer is free most of the time."""
_EVERY_S = 600.0
_FIRST_BATCH = 200
_JOBS_AT_ONCE = 20
_VMS_AT_ONCE = 5_000
_OF_JOB: tuple[tuple[InstrumentedAttribute[str], InstrumentedAttribute[Any]], ...] = (
    (MetricRow.job_id, MetricRow.step),
    (MetricBlockRow.job_id, MetricBlockRow.block),
    (LoggedValueRow.job_id, LoggedValueRow.name),
    (TraceRow.job_id, TraceRow.generation),
    (StackRow.job_id, StackRow.generation),
    (WorkerRow.job_id, WorkerRow.generation),
    (CheckpointRow.job_id, CheckpointRow.generation),
    (GenerationRow.job_id, GenerationRow.number),
    (JobVmRow.job_id, JobVmRow.vm_id),
    (JobProgressRow.job_id, JobProgressRow.newest),
)
"""What goes with a job: the column of its id, and one behind it by which an index orders the job's rows."""

Chore = Callable[[float, int], Awaitable[int]]
"""Takes the time before which things must have ended, and about how many rows to delete at most; returns how many it
deleted. 0: nothing is left now."""


class Retention:
    """`emulated`: the provider, if its VMs leave their logs on this machine.

    It is a controller of the leader: `reconcile_once` deletes one batch.
    """

    name = "retention"

    def __init__(
        self,
        database: Database,
        events: EventLog,
        archives: ArchiveService,
        keep: KeepDays,
        emulated: EmulatedProvider | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._events = events
        self._archives = archives
        self._keep = keep
        self._emulated = emulated
        self._now = now
        self._log = structlog.get_logger("varuna.retention")
        self._chores: dict[str, tuple[float | None, Chore]] = {
            "jobs that are over": (keep.jobs, self._mark_jobs),
            "rows of deleted jobs": (None, self._delete_job_rows),
            "events": (keep.events, self._delete_events),
            "details of generations": (keep.logs, self._trim_generations),
            "traces": (keep.logs, self._delete_traces),
            "stacks": (keep.logs, self._delete_stacks),
            "VMs": (keep.vms, self._delete_vms),
            "logs of VMs": (keep.logs, self._delete_logs),
            "archives": (keep.archives, self._delete_archives),
            "tokens": (keep.tokens, self._delete_tokens),
        }
        """With the days for which each kind is kept; None: it goes at once."""
        self._batches = dict.fromkeys(self._chores, _FIRST_BATCH)
        self._done = dict.fromkeys(self._chores, 0)
        self._left = list(self._chores)
        self.held_s = 0.0
        """How long the present batch has held the writer."""
        self._due_vms: list[str] = []
        """Found and not deleted yet. Finding them takes longer than deleting them, because jobs name many others."""
        self._unremovable: set[str] = set()
        """VMs whose folders could not be removed."""
        self._trimmed: tuple[float, int] = (0.0, 0)
        """The end and the id of the generation up to which all are trimmed; a manager that starts looks again."""

    async def reconcile_once(self) -> float:
        return _PAUSE_S if await self.delete_some() else _EVERY_S

    async def delete_some(self) -> bool:
        """One batch; False: nothing is left to delete now."""
        while self._left:
            name = self._left[0]
            days, delete_batch = self._chores[name]
            before = self._now() if days is None else find_horizon(self._now(), days)
            self.held_s, count = 0.0, 0
            try:
                count = 0 if before is None else await delete_batch(before, self._batches[name])
            except (NotLeaderError, StoreAwayError):
                raise
            except Exception:
                # An error with one kind of row must not block the others for ever.
                self._log.exception("this cannot be deleted: trying again later", what=name)
            if count:
                self._done[name] += count
                self._batches[name] = choose_batch_size(self._batches[name], self.held_s)
                return True
            self._left.pop(0)
        self._left = list(self._chores)
        if any(self._done.values()):
            deleted = {name: count for name, count in self._done.items() if count}
            self._log.info("deleted what was kept for long enough", deleted=deleted)
            self._done = dict.fromkeys(self._chores, 0)
        return False

    # ------------------------------------------------------------ jobs

    async def _mark_jobs(self, before: float, most: int) -> int:
        runs = exists().where(WorkerRow.job_id == JobRow.id, WorkerRow.state.in_(ALIVE))
        is_due = and_(JobRow.state.in_(OVER), JobRow.finished_at < before, IS_KEPT, ~runs)
        ids = await self._find(select(JobRow.id).where(is_due).limit(_JOBS_AT_ONCE))
        if not ids:
            return 0
        async with self._write() as session:
            rows = (await session.scalars(select(JobRow).where(is_due, JobRow.id.in_(ids)))).all()
            for row in rows:
                mark_deleted(
                    session, self._events, row, self._now(), f"after {self._keep.jobs:g} days (--keep-jobs-days)"
                )
        return len(rows)

    async def _delete_job_rows(self, before: float, most: int) -> int:
        ids = await self._find(select(JobRow.id).where(~IS_KEPT).limit(1))
        if not ids:
            return 0
        (job_id,) = ids
        for owner, order in _OF_JOB:
            if count := await self._delete_until(owner == job_id, order, most):
                return count
        its_events = (EventRow.job_id == job_id) & (EventRow.kind != JOB_DELETED)
        if count := await self._delete_until(its_events & await self._not_newest(), EventRow.id, most):
            return count
        async with self._write() as session:
            await session.execute(delete(JobRow).where(JobRow.id == job_id), execution_options=name_changes())
        return 1

    # ------------------------------------------------------------ what happened

    async def _delete_events(self, before: float, most: int) -> int:
        return await self._delete_until((EventRow.at < before) & await self._not_newest(), EventRow.at, most)

    async def _not_newest(self) -> ColumnElement[bool]:
        """The newest event stays: SQLite would give its number to the next one, which followers have seen already."""
        newest = await self._find(select(func.max(EventRow.id)))
        return EventRow.id != (newest[0] or 0)  # not "<", or SQLite would look for it, and not for the time

    async def _delete_traces(self, before: float, most: int) -> int:
        return await self._delete_until(TraceRow.at < before, TraceRow.at, most)

    async def _delete_stacks(self, before: float, most: int) -> int:
        return await self._delete_until(StackRow.at < before, StackRow.at, most)

    async def _trim_generations(self, before: float, most: int) -> int:
        """Drop details for investigations; what a generation did, and on which VMs, stays with its job."""
        row = GenerationRow
        at, last_id = self._trimmed
        is_next = and_(row.ended_at >= at, or_(row.ended_at > at, row.id > last_id), row.ended_at < before)
        query = select(row.ended_at, row.id, row.job_id, row.number).where(is_next)
        async with self._database.read() as session:
            found = (await session.execute(query.order_by(row.ended_at, row.id).limit(most))).all()
        if not found:
            return 0
        async with self._write() as session:
            full = and_(row.id.in_([one.id for one in found]), func.length(cast(row.candidates, Text)) > 2)
            options = name_changes()
            await session.execute(update(row).where(full).values(candidates=[]), execution_options=options)
            keys = [(one.job_id, one.number) for one in found]
            for job_id in sorted({job_id for job_id, _ in keys}):
                numbers = [number for owner, number in keys if owner == job_id]
                of_these = and_(WorkerRow.job_id == job_id, WorkerRow.generation.in_(numbers))
                has_past = func.length(cast(WorkerRow.history, Text)) > 2
                await session.execute(
                    update(WorkerRow).where(of_these, has_past, WorkerRow.state.not_in(ALIVE)).values(history=[]),
                    execution_options=options,
                )
        self._trimmed = (found[-1].ended_at, found[-1].id)
        return len(found)

    # ------------------------------------------------------------ VMs

    async def _delete_vms(self, before: float, most: int) -> int:
        """Delete VMs that no job names; their cost is kept by day."""
        is_due = and_(VmRow.gone_at < before, ~exists().where(WorkerRow.vm_id == VmRow.id))
        if not self._due_vms:
            found = await self._find(select(VmRow.id).where(is_due).order_by(VmRow.gone_at).limit(_VMS_AT_ONCE))
            self._due_vms = list(found)
        ids, self._due_vms = self._due_vms[:most], self._due_vms[most:]
        if not ids:
            return 0
        async with self._write() as session:
            columns = (VmRow.id, VmRow.created_at, VmRow.gone_at, VmRow.gpus, VmRow.price_per_hour)
            rows = (await session.execute(select(*columns).where(is_due, VmRow.id.in_(ids)))).all()
            gone = [row.id for row in rows]
            prices: dict[str, list[PastPrice]] = {}
            for past in await session.scalars(select(VmPriceRow).where(VmPriceRow.vm_id.in_(gone))):
                prices.setdefault(past.vm_id, []).append(PastPrice(past.since, past.until, past.price_per_hour))
            pasts = [
                GoneVm(
                    created_at=row.created_at,
                    gone_at=row.gone_at,
                    gpus=row.gpus,
                    price_per_hour=row.price_per_hour,
                    past_prices=prices.get(row.id, ()),
                )
                for row in rows
            ]
            await _add_days(session, pasts)
            for column in (EnrolmentRow.vm_id, VmUsageRow.vm_id, VmPriceRow.vm_id, VmRow.id):
                await session.execute(delete(column.class_).where(column.in_(gone)), execution_options=name_changes())
        return len(ids)

    async def _delete_logs(self, before: float, most: int) -> int:
        """The folders of local VMs that are gone, with their workers' logs."""
        if self._emulated is None:
            return 0
        left = await self._emulated.list_ended_vms()
        old = {vm_id for vm_id, written_at in left.items() if written_at < before} - self._unremovable
        if not old:
            return 0
        kept = set(await self._find(select(VmRow.id).where(or_(NOT_GONE, VmRow.gone_at >= before))))
        for vm_id in sorted(old - kept)[:1]:
            try:
                await self._emulated.forget_vm(vm_id)
            except OSError as error:
                self._unremovable.add(vm_id)
                self._log.warning("the folder of a VM that is gone cannot be removed", vm=vm_id, error=str(error))
            return 1
        return 0

    # ------------------------------------------------------------ archives, tokens

    async def _delete_archives(self, before: float, most: int) -> int:
        """Delete archives whose jobs have all ended long ago. Archives that no job names are deleted elsewhere."""
        names = JobRow.archive == ArchiveRow.sha256
        is_over = and_(JobRow.state.in_(OVER), JobRow.finished_at < before)
        needed = exists().where(names, IS_KEPT, ~is_over)
        is_due = and_(exists().where(names), ~needed)
        found = await self._find(select(ArchiveRow.sha256).where(is_due).limit(1))
        return int(bool(found) and await self._archives.delete_archive(found[0], only_if=is_due))

    async def _delete_tokens(self, before: float, most: int) -> int:
        """Delete tokens that can no longer be used; at once those of VMs that were never made, which are many while a
        market has no capacity."""
        row = TokenRow
        is_used = and_(row.single_use.is_(True), row.last_used_at < before)
        is_ours = and_(row.created_by == BY_MANAGER, row.single_use.is_(True))
        is_left = and_(is_ours, row.last_used_at.is_(None), row.expires_at < self._now())
        is_old = or_(row.revoked_at < before, row.expires_at < before, is_used)
        return await self._delete_until(or_(is_old, is_left), row.id, most)

    # ------------------------------------------------------------ how

    @asynccontextmanager
    async def _write(self) -> AsyncIterator[AsyncSession]:
        async with self._database.write() as session:
            began = time.perf_counter()
            yield session
        self.held_s += time.perf_counter() - began

    async def _find(self, query: Any) -> Sequence[Any]:
        async with self._database.read() as session:
            found: Sequence[Any] = (await session.scalars(query)).all()
            return found

    async def _delete_until(self, condition: ColumnElement[bool], order: InstrumentedAttribute[Any], most: int) -> int:
        """Delete the first `most` such rows by this column, and those equal to the last of them."""
        ordered = select(order).where(condition).order_by(order)
        last = await self._find(ordered.offset(most - 1).limit(1)) or await self._find(
            select(func.max(order)).where(condition)
        )
        if not last or last[0] is None:
            return 0
        async with self._write() as session:
            result = await session.execute(
                delete(order.class_).where(condition, order <= last[0]),
                execution_options=name_changes(),  # these rows belong to jobs that have ended
            )
            assert isinstance(result, CursorResult)
            return max(result.rowcount, 1)


async def _add_days(session: AsyncSession, pasts: Sequence[GoneVm]) -> None:
    for number, day in sum_up_by_day(pasts).items():
        row = await session.get(FleetDayRow, number)
        if row is None:
            session.add(FleetDayRow(day=number, **asdict(day)))
            continue
        for name, value in asdict(day).items():
            setattr(row, name, getattr(row, name) + value)
