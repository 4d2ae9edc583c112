"""The fleet's VMs as its users look at them: ten thousand at once, filtered, in numbers, and over time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Row, Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import EventRow, VmRow, WorkerRow
from varuna_manager.domain import accounting
from varuna_manager.domain.states import VmState
from varuna_manager.services import documents
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import InvalidError, NotFoundError
from varuna_manager.services.fleet import live_workers
from varuna_manager.services.jobs import ALIVE, find
from varuna_manager.services.paging import Order, Page
from varuna_manager.services.vm_registry import VmRegistry

_Vm = Row[*tuple[Any, ...]]
_VmQuery = Select[*tuple[Any, ...]]
_OLDEST_FIRST = Order[_Vm]((VmRow.created_at, VmRow.id), lambda row: (row.created_at, row.id), (float, str))


class _VmFacts(NamedTuple):
    """What a VM's document tells of its row. Ten thousand whole objects, or SQLAlchemy's rows, take far longer."""

    id: str
    provider: str
    state: str
    gpus: int
    device_memory_bytes: int | None
    host: str | None
    ref: dict[str, Any]
    created_at: float
    reason: str | None
    slow_ratio: float | None
    slow_reason: str | None
    quarantined_until: float | None
    quarantines: int
    notice_deadline: float | None
    drain_deadline: float | None
    hangs: int
    price_per_hour: float | None


class _WorkerFacts(NamedTuple):
    """What a worker's document tells of its row."""

    job_id: str
    generation: int
    rank: int
    vm_id: str
    local_rank: int
    state: str
    pid: int | None
    cause: str | None
    exit_code: int | None
    error_text: str | None


_VMS = select(*(VmRow.__table__.c[name] for name in _VmFacts._fields))
_WORKERS = (
    select(*(WorkerRow.__table__.c[name] for name in _WorkerFacts._fields))
    .where(WorkerRow.state.in_(ALIVE))
    .order_by(WorkerRow.job_id, WorkerRow.generation, WorkerRow.rank)
)
_BY_ID = 500
"""So many VMs' workers are asked for one by one; of more, all there are."""
_AT_ONCE = 500
"""Documents that are made while nothing else runs: some milliseconds. Heartbeats are handled between them."""
_HISTORY_KINDS = {
    "vm_requested": "added",
    "vm_gone": "gone",
    "vm_lost": "lost",
    "vm_ready": "ready",
    "preemption_notice": "notices",
    "vm_quarantined": "quarantines",
}


@dataclass(frozen=True, kw_only=True)
class VmFilter:
    """None, and no states: any."""

    gone: bool = True
    """Whether those that are no more are in it."""
    states: Sequence[str] = ()
    provider: str | None = None
    job: str | None = None
    """With workers of this job (name or id) on them, that have not stopped."""
    quarantined: bool | None = None
    text: str | None = None
    """In its id or its host."""


class VmList:
    def __init__(self, database: Database, registry: VmRegistry, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._registry = registry
        self._now = now

    async def page(self, wanted: VmFilter, *, limit: int, cursor: str | None = None) -> Page:
        """Those VMs, the oldest first. Raises NotFoundError for an unknown job."""
        async with self._database.read() as session:
            query = await self._filtered(session, _VMS, wanted)
            rows, following = _OLDEST_FIRST.cut(
                (await session.execute(_OLDEST_FIRST.of(query, cursor, limit))).all(), limit
            )
            workers = await _workers_on(session, [row.id for row in rows])
        items: list[Document] = []
        for first in range(0, len(rows), _AT_ONCE):
            facts = map(_VmFacts._make, rows[first : first + _AT_ONCE])
            items += [self._document(vm, workers.get(vm.id, ())) for vm in facts]
            await asyncio.sleep(0)
        return Page(items, following)

    async def one(self, vm_id: str) -> Document:
        """Raises NotFoundError."""
        async with self._database.read() as session:
            row = await session.get(VmRow, vm_id)
            if row is None:
                raise NotFoundError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
            workers = await live_workers(session, vm_id)
        return {**self._document(row, workers), "history": documents.history_document(row.history)}

    async def summary(self) -> Document:
        """The fleet in numbers."""
        now = self._now()
        there = VmRow.state != VmState.GONE.value
        quarantined = VmRow.quarantined_until > now
        async with self._database.read() as session:
            states = await session.execute(
                select(VmRow.state, func.count(), func.sum(VmRow.gpus), func.sum(VmRow.price_per_hour)).group_by(
                    VmRow.state
                )
            )
            by_state = {state: (count, int(gpus), price) for state, count, gpus, price in states}
            marks = [
                await session.scalar(select(func.count()).select_from(VmRow).where(there, mark)) or 0
                for mark in (quarantined, VmRow.slow_ratio.is_not(None), VmRow.notice_deadline.is_not(None))
            ]
            workers = await session.scalar(
                select(func.count()).select_from(WorkerRow).where(WorkerRow.state.in_(ALIVE))
            )
        gone = by_state.pop(VmState.GONE.value, (0, 0, None))[0]
        prices = [price for _, _, price in by_state.values() if price is not None]
        return {
            "total": sum(count for count, _, _ in by_state.values()),
            "gone": gone,
            "by_state": {
                state.value: by_state.get(state.value, (0,))[0] for state in VmState if state is not VmState.GONE
            },
            "gpus": by_state.get(VmState.READY.value, (0, 0, None))[1],
            "gpus_busy": workers or 0,
            "workers": workers or 0,
            "quarantined": marks[0],
            "slow": marks[1],
            "noticed": marks[2],
            "cost_per_hour": sum(prices) if prices else None,
        }

    async def history(self, since: float | None, until: float | None, points: int) -> Document:
        """How many VMs there were, and what happened to them, in so many buckets. `since` None: a day before the end.

        Raises InvalidError.
        """
        end = self._now() if until is None else min(until, self._now())
        start = end - 86_400.0 if since is None else since
        if start >= end:
            raise InvalidError("since is not before until (or lies in the future): give an earlier one")
        query = select(EventRow.kind, EventRow.at).where(EventRow.kind.in_(_HISTORY_KINDS), EventRow.at >= start)
        async with self._database.read() as session:
            found = (await session.execute(query)).all()
            there = select(func.count()).select_from(VmRow).where(VmRow.state != VmState.GONE.value)
            present_now = await session.scalar(there) or 0
        times: dict[str, list[float]] = {name: [] for name in _HISTORY_KINDS.values()}
        for kind, at in found:
            times[_HISTORY_KINDS[kind]].append(at)
        edges = np.linspace(start, end, points + 1)
        counts = {name: np.histogram(at, edges)[0].tolist() for name, at in times.items()}
        added, gone = np.sort(times["added"]), np.sort(times["gone"])
        after = [len(at) - np.searchsorted(at, edges[1:], side="right") for at in (added, gone)]
        return {
            "bucket_s": (end - start) / points,
            "at_unix_s": edges[1:].tolist(),
            "present": np.maximum(present_now - after[0] + after[1], 0).tolist(),
            "ready": counts["ready"],
            "lost": [lost + gone for lost, gone in zip(counts["lost"], counts["gone"], strict=True)],
            "notices": counts["notices"],
            "quarantines": counts["quarantines"],
        }

    async def cost(self, since: float | None) -> Document:
        """What the fleet cost since then, whether jobs ran or not. None: since its first VM."""
        now = self._now()
        async with self._database.read() as session:
            start = since if since is not None else await session.scalar(select(func.min(VmRow.created_at)))
            start = now if start is None else min(start, now)
            columns = (VmRow.id, VmRow.state, VmRow.gpus, VmRow.created_at, VmRow.price_per_hour)
            there = await session.execute(select(*columns).where(VmRow.state != VmState.GONE.value))
            uses = [_use(row, start, now) for row in there]
            gone = await session.execute(select(*columns, VmRow.history).where(VmRow.state == VmState.GONE.value))
            uses += [_use(row, start, row.history[-1]["at"]) for row in gone]
        uses = [use for use in uses if use.seconds > 0]
        whole = accounting.total(accounting.bills(uses))
        prices = [use.price_per_hour for use in uses if use.price_per_hour is not None]
        return {
            "since": documents.iso(start),
            "vms": len(uses),
            "vm_hours": whole.hours,
            "gpu_hours": whole.gpu_hours,
            "cost": whole.cost,
            "cost_per_hour": (await self.summary())["cost_per_hour"],
            "vms_without_price": len(uses) - len(prices),
        }

    async def _filtered(self, session: AsyncSession, query: _VmQuery, wanted: VmFilter) -> _VmQuery:
        if not wanted.gone:
            query = query.where(VmRow.state != VmState.GONE.value)
        if wanted.states:
            query = query.where(VmRow.state.in_(wanted.states))
        if wanted.provider is not None:
            query = query.where(VmRow.provider == wanted.provider)
        if wanted.job is not None:
            job = await find(session, wanted.job)
            on = select(WorkerRow.vm_id).where(WorkerRow.job_id == job.id, WorkerRow.state.in_(ALIVE))
            query = query.where(VmRow.id.in_(on))
        if wanted.quarantined is not None:
            until = func.coalesce(VmRow.quarantined_until, 0.0)
            query = query.where(until > self._now() if wanted.quarantined else until <= self._now())
        if wanted.text is not None:
            texts = (column.contains(wanted.text, autoescape=True) for column in (VmRow.id, VmRow.host))
            query = query.where(or_(*texts))
        return query

    def _document(self, row: Any, workers: Sequence[Any]) -> Document:
        heard = self._registry.workers(row.id) if workers else ()
        return documents.vm_document(row, workers, self._registry.last_heard_s(row.id), heard)


async def _workers_on(session: AsyncSession, vm_ids: Sequence[str]) -> dict[str, list[_WorkerFacts]]:
    """The workers that have not stopped, by VM."""
    query = _WORKERS if len(vm_ids) > _BY_ID else _WORKERS.where(WorkerRow.vm_id.in_(vm_ids))
    by_vm: dict[str, list[_WorkerFacts]] = {}
    for worker in map(_WorkerFacts._make, await session.execute(query)):
        by_vm.setdefault(worker.vm_id, []).append(worker)
    return by_vm


def _use(row: _Vm, start: float, end: float) -> accounting.Use:
    return accounting.Use(
        vm_id=row.id,
        seconds=end - max(row.created_at, start),
        gpus=row.gpus,
        vm_gpus=row.gpus,
        price_per_hour=row.price_per_hour,
    )
