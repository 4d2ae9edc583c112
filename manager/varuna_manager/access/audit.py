"""The log of requests that change something or were refused: who, what, from where, with which result."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import delete, select

from varuna_manager.answers.documents import format_time
from varuna_manager.db.engine import Database
from varuna_manager.db.models import AuditRow
from varuna_manager.domain.access import Principal
from varuna_proto.rest_fleet import AuditEntryDocument

_MOST_ACTION = 500
_KEPT_ROWS = 100_000
_PRUNED_EACH = 1_000


class AuditLog:
    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

    async def add_entry(
        self, principal: Principal | None, address: str, action: str, *, status: int | None = None, who: str = "unknown"
    ) -> int:
        """Record a request before it is carried out, so that none is missing. Returns the number of the entry.

        `principal` None: `who` sent it without a token of REST. `action` is method and path: never a query, a header or
        a body, which may contain secrets.
        """
        row = AuditRow(
            at=self._now(),
            who=who if principal is None else principal.name,
            role=None if principal is None else principal.role.value,
            address=address,
            action=action[:_MOST_ACTION],
            status=status,
        )
        async with self._database.write() as session:
            session.add(row)
            await session.flush()
            if row.id % _PRUNED_EACH == 0:
                await session.execute(delete(AuditRow).where(AuditRow.id <= row.id - _KEPT_ROWS))
        return row.id

    async def set_status(self, entry: int, status: int) -> None:
        """Add the HTTP status of the answer."""
        async with self._database.write() as session:
            row = await session.get(AuditRow, entry)
            if row is not None:
                row.status = status

    async def list_entries(self, after_id: int, limit: int) -> list[AuditEntryDocument]:
        """The entries after number `after_id`, oldest first."""
        query = select(AuditRow).where(AuditRow.id > after_id).order_by(AuditRow.id).limit(limit)
        async with self._database.read() as session:
            return [_make_document(row) for row in await session.scalars(query)]


def _make_document(row: AuditRow) -> AuditEntryDocument:
    return {
        "id": row.id,
        "at": format_time(row.at),
        "who": row.who,
        "role": row.role,
        "address": row.address,
        "action": row.action,
        "status": row.status,
    }
