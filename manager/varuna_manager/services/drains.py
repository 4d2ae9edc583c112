"""Taking a VM out of use, and back: a cordon lasts until somebody lifts it, whatever becomes of the VM meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import VmRow
from varuna_manager.domain.states import VmState
from varuna_manager.services import documents
from varuna_manager.services.bell import Bell
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import ConflictError, NotFoundError
from varuna_manager.services.events import EventLog
from varuna_manager.services.fleet import FleetService, live_workers


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

    async def drain(self, vm_id: str, deadline_s: float | None) -> Document:
        """Cordon the VM, have its workers save and leave, and give it back. `deadline_s`: it is to be empty by then,
        saved or not; None: when it is. Asking again changes the deadline at most.

        Raises NotFoundError, and ConflictError when the VM is gone.
        """
        async with self._database.write() as session:
            row = await self._row(session, vm_id, "drain")
            if deadline_s is not None:
                row.drain_deadline = self._now() + deadline_s
            row.cordoned_at = row.cordoned_at or self._now()
            if row.vm_state is not VmState.DRAINING:
                within = "" if deadline_s is None else f", within {deadline_s:.0f} s"
                await self._fleet.move_vm(session, row, VmState.DRAINING, f"drained by the user{within}")
            return await self._told(session, row)

    async def cordon(self, vm_id: str) -> Document:
        """Start nothing new on the VM until the cordon is lifted; what runs there goes on.

        Raises NotFoundError, and ConflictError when the VM is gone.
        """
        async with self._database.write() as session:
            row = await self._row(session, vm_id, "cordon")
            if row.cordoned_at is None:
                row.cordoned_at = self._now()
                self._events.add(session, "vm_cordoned", f"VM {vm_id} is cordoned by the user", vm_id=vm_id)
            return await self._told(session, row)

    async def uncordon(self, vm_id: str) -> Document:
        """Use the VM again.

        Raises NotFoundError, and ConflictError when the VM is gone, or drained and about to be given back.
        """
        async with self._database.write() as session:
            row = await self._row(session, vm_id, "uncordon")
            if row.vm_state is VmState.DRAINING and not self._fleet.keeps_drained_vms:
                raise ConflictError(
                    f"VM {vm_id!r} is draining ({row.reason}) and is given back when it is empty: it cannot be kept"
                )
            if row.cordoned_at is not None:
                row.cordoned_at = None
                self._events.add(session, "vm_uncordoned", f"VM {vm_id} may be used again", vm_id=vm_id)
            return await self._told(session, row)

    async def _row(self, session: AsyncSession, vm_id: str, verb: str) -> VmRow:
        row = await session.get(VmRow, vm_id)
        if row is None:
            raise NotFoundError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
        if row.vm_state is VmState.GONE:
            raise ConflictError(f"VM {vm_id!r} is gone already ({row.reason}): there is nothing to {verb}")
        return row

    async def _told(self, session: AsyncSession, row: VmRow) -> Document:
        workers = await live_workers(session, row.id)
        after_commit(session, self._bell.ring)
        return documents.vm_document(row, workers, None)
