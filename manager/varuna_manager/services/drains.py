"""Taking a VM out of use in good order: its workers save first, and then it is given back."""

from __future__ import annotations

import time
from collections.abc import Callable

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import VmRow
from varuna_manager.domain.states import VmState
from varuna_manager.services import documents
from varuna_manager.services.bell import Bell
from varuna_manager.services.documents import Document
from varuna_manager.services.errors import ConflictError, NotFoundError
from varuna_manager.services.fleet import FleetService, live_workers


class DrainService:
    def __init__(
        self, database: Database, fleet: FleetService, bell: Bell, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._fleet = fleet
        self._bell = bell
        self._now = now

    async def drain(self, vm_id: str, deadline_s: float | None) -> Document:
        """Nothing new starts on the VM, its workers save and leave, and it is given back. `deadline_s`: it is to be
        empty by then, saved or not; None: when it is. Asking again changes the deadline at most.

        Raises NotFoundError, and ConflictError when the VM is gone.
        """
        async with self._database.write() as session:
            row = await session.get(VmRow, vm_id)
            if row is None:
                raise NotFoundError(f"VM {vm_id!r} does not exist: varuna vms (GET /api/v1/vms) lists those that do")
            if row.vm_state is VmState.GONE:
                raise ConflictError(f"VM {vm_id!r} is gone already ({row.reason}): there is nothing to drain")
            if deadline_s is not None:
                row.drain_deadline = self._now() + deadline_s
            if row.vm_state is not VmState.DRAINING:
                within = "" if deadline_s is None else f", within {deadline_s:.0f} s"
                await self._fleet.move_vm(session, row, VmState.DRAINING, f"drained by the user{within}")
            workers = await live_workers(session, vm_id)
            after_commit(session, self._bell.ring)
        return documents.vm_document(row, workers, None)
