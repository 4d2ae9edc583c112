"""The fleet's VMs for users: ten thousand at once, filtered, and as totals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Row, Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.answers.documents import make_state_changes
from varuna_manager.answers.errors import MissingError
from varuna_manager.answers.paging import Order, Page
from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow, WorkerRow
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.documents import make_vm_document
from varuna_manager.fleet.workers import ListedWorker, read_workers_on
from varuna_manager.jobs.jobs import ALIVE, find_job_row
from varuna_manager.world.reading import NOT_GONE
from varuna_manager.world.vm_registry import VmRegistry
from varuna_proto.rest_fleet import VmDetailDocument, VmDocument, VmSummaryDocument

_Vm = Row[*tuple[Any, ...]]
_VmQuery = Select[*tuple[Any, ...]]
_OLDEST_FIRST = Order[_Vm]((VmRow.created_at, VmRow.id), lambda row: (row.created_at, row.id), (float, str))


class _ListedVm(NamedTuple):
    """The columns of a VM's document. Ten thousand whole objects, or SQLAlchemy's rows, take far longer."""

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
    cordoned_at: float | None
    hangs: int
    price_per_hour: float | None
    gpu_type: str | None
    pool: str | None
    zone: str | None
    machine_type: str | None


_VMS = select(*(VmRow.__table__.c[name] for name in _ListedVm._fields))
_AT_ONCE = 500
"""Documents that are made before other tasks, such as heartbeats, may run: some milliseconds."""


@dataclass(frozen=True, kw_only=True)
class VmFilter:
    """None, and no states: any."""

    gone: bool = True
    """Whether VMs that are gone are included."""
    states: Sequence[str] = ()
    provider: str | None = None
    job: str | None = None
    """Only VMs with workers of this job (name or id) that have not stopped."""
    quarantined: bool | None = None
    text: str | None = None
    """A part of its id or host."""


class VmList:
    def __init__(self, database: Database, registry: VmRegistry, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._registry = registry
        self._now = now

    async def list_page(self, wanted: VmFilter, *, limit: int, cursor: str | None = None) -> Page[VmDocument]:
        """The matching VMs, oldest first. Raises MissingError for an unknown job."""
        async with self._database.read() as session:
            found, workers = await self._read_facts(session, wanted, limit=limit, cursor=cursor)
        items: list[VmDocument] = []
        for first in range(0, len(found.items), _AT_ONCE):
            items += [self._document(vm, workers.get(vm.id, ())) for vm in found.items[first : first + _AT_ONCE]]
            await asyncio.sleep(0)
        return Page(items, found.next_cursor)

    async def read_page(
        self, session: AsyncSession, wanted: VmFilter, *, limit: int, cursor: str | None = None
    ) -> Page[VmDocument]:
        """As `list_page`, for a few VMs, with the caller's session."""
        found, workers = await self._read_facts(session, wanted, limit=limit, cursor=cursor)
        return Page([self._document(vm, workers.get(vm.id, ())) for vm in found.items], found.next_cursor)

    async def _read_facts(
        self, session: AsyncSession, wanted: VmFilter, *, limit: int, cursor: str | None
    ) -> tuple[Page[_ListedVm], Mapping[str, Sequence[ListedWorker]]]:
        """The matching VMs, and by VM its workers that have not stopped."""
        query = await self._filtered(session, _VMS, wanted)
        rows, following = _OLDEST_FIRST.cut_page(
            (await session.execute(_OLDEST_FIRST.make_page_query(query, cursor, limit))).all(), limit
        )
        workers = await read_workers_on(session, [row.id for row in rows])
        return Page([*map(_ListedVm._make, rows)], following), workers

    async def find_vm(self, vm_id: str) -> VmDetailDocument:
        """Raises MissingError."""
        async with self._database.read() as session:
            row = await session.get(VmRow, vm_id)
            if row is None:
                raise MissingError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
            workers = (await read_workers_on(session, [vm_id])).get(vm_id, [])
        return {**self._document(row, workers), "history": make_state_changes(row.history)}

    async def summarize_vms(self) -> VmSummaryDocument:
        """Totals of the fleet."""
        async with self._database.read() as session:
            return await self.read_summary(session)

    async def read_summary(self, session: AsyncSession) -> VmSummaryDocument:
        """As `summarize_vms`, with the caller's session."""
        quarantined = VmRow.quarantined_until > self._now()
        states = await session.execute(
            select(VmRow.state, func.count(), func.sum(VmRow.gpus), func.sum(VmRow.price_per_hour))
            .where(NOT_GONE)
            .group_by(VmRow.state)
        )
        by_state = {state: (count, int(gpus), price) for state, count, gpus, price in states}
        marks = [
            await session.scalar(select(func.count()).select_from(VmRow).where(NOT_GONE, mark)) or 0
            for mark in (quarantined, VmRow.slow_ratio.is_not(None), VmRow.notice_deadline.is_not(None))
        ]
        gone = await session.scalar(select(func.count()).where(VmRow.state == VmState.GONE.value)) or 0
        workers = await session.scalar(select(func.count()).select_from(WorkerRow).where(WorkerRow.state.in_(ALIVE)))
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

    async def _filtered(self, session: AsyncSession, query: _VmQuery, wanted: VmFilter) -> _VmQuery:
        if not wanted.gone:
            query = query.where(NOT_GONE)
        if wanted.states:
            query = query.where(VmRow.state.in_(wanted.states))
        if wanted.provider is not None:
            query = query.where(VmRow.provider == wanted.provider)
        if wanted.job is not None:
            job = await find_job_row(session, wanted.job)
            on = select(WorkerRow.vm_id).where(WorkerRow.job_id == job.id, WorkerRow.state.in_(ALIVE))
            query = query.where(VmRow.id.in_(on))
        if wanted.quarantined is not None:
            until = func.coalesce(VmRow.quarantined_until, 0.0)
            query = query.where(until > self._now() if wanted.quarantined else until <= self._now())
        if wanted.text is not None:
            texts = (column.contains(wanted.text, autoescape=True) for column in (VmRow.id, VmRow.host))
            query = query.where(or_(*texts))
        return query

    def _document(self, row: Any, workers: Sequence[ListedWorker]) -> VmDocument:
        healths = self._registry.list_workers(row.id) if workers else ()
        silence_s, held_bytes = self._registry.silence_s(row.id), self._registry.get_held_bytes(row.id)
        return make_vm_document(row, workers, silence_s, healths, held_bytes)
