"""Takes a VM out of use, and puts it back: a cordon lasts until it is lifted, whatever happens to the VM meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.answers.errors import ConflictError, MissingError
from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import VmRow
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.documents import make_vm_document
from varuna_manager.fleet.fleet import FleetService, live_workers
from varuna_manager.fleet.workers import read_workers_on
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_proto.rest_fleet import VmDocument


class DrainService:
    def __init__(
        self,
        database: Database,
        fleet: FleetService,
        events: EventLog,
        bell: Bell,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._fleet = fleet
        self._events = events
        self._bell = bell
        self._now = now

    async def drain_vm(self, vm_id: str, deadline_s: float | None) -> VmDocument:
        """Cordon the VM, have its workers save and leave, and give it back.

        `deadline_s`: when it must be empty, saved or not; None: no limit. A repeated call changes only the deadline.
        Raises MissingError, and ConflictError when the VM is gone.
        """
        async with self._database.write() as session:
            row = await self._row(session, vm_id, "drain")
            if deadline_s is not None:
                row.drain_deadline = self._now() + deadline_s
            row.cordoned_at = row.cordoned_at or self._now()
            row.drained_at = row.drained_at or self._now()
            if row.vm_state is not VmState.DRAINING:
                within = "" if deadline_s is None else f", within {deadline_s:.0f} s"
                await self._fleet.move_vm(session, row, VmState.DRAINING, f"drained by the user{within}")
            return await self._make_document(session, row)

    async def cordon_vm(self, vm_id: str) -> VmDocument:
        """Start nothing new on the VM until the cordon is lifted; what runs there goes on.

        Raises MissingError, and ConflictError when the VM is gone.
        """
        async with self._database.write() as session:
            row = await self._row(session, vm_id, "cordon")
            if row.cordoned_at is None:
                row.cordoned_at = self._now()
                self._events.emit_event(session, "vm_cordoned", f"VM {vm_id} is cordoned by the user", vm_id=vm_id)
            return await self._make_document(session, row)

    async def uncordon_vm(self, vm_id: str) -> VmDocument:
        """Use the VM again.

        Raises MissingError, and ConflictError when the VM is gone, or drained and about to be given back.
        """
        async with self._database.write() as session:
            row = await self._row(session, vm_id, "uncordon")
            if row.vm_state is VmState.DRAINING and not self._fleet.keeps_drained_vms:
                raise ConflictError(
                    f"VM {vm_id!r} is draining ({row.reason}) and is given back when it is empty: it cannot be kept"
                )
            if row.cordoned_at is not None:
                row.cordoned_at = row.drained_at = None
                self._events.emit_event(session, "vm_uncordoned", f"VM {vm_id} may be used again", vm_id=vm_id)
            if self._fleet.keeps_drained_vms and row.notice_deadline is not None:
                await self._end_notice(session, row, row.notice_deadline)
            return await self._make_document(session, row)

    async def _end_notice(self, session: AsyncSession, row: VmRow, deadline: float) -> None:
        """Use a host again that is still there after its notice. One with workers is used when they have left, and its
        agent has started again."""
        if self._now() < deadline:
            return
        row.notice_id = row.notice_deadline = None
        if row.vm_state is VmState.DRAINING and not await live_workers(session, row.id):
            await self._fleet.move_vm(session, row, VmState.READY, "its notice is over, and the user has uncordoned it")

    async def _row(self, session: AsyncSession, vm_id: str, verb: str) -> VmRow:
        row = await session.get(VmRow, vm_id)
        if row is None:
            raise MissingError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
        if row.vm_state is VmState.GONE:
            raise ConflictError(f"VM {vm_id!r} is gone already ({row.reason}): there is nothing to {verb}")
        return row

    async def _make_document(self, session: AsyncSession, row: VmRow) -> VmDocument:
        workers = (await read_workers_on(session, [row.id])).get(row.id, [])
        after_commit(session, self._bell.notify_listeners)
        return make_vm_document(row, workers, None)
