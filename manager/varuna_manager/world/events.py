"""The event log: what happened and what was decided, with the reason, in the order of commits."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database, after_commit
from varuna_manager.db.models import EventRow
from varuna_manager.world.bell import Bell, wait
from varuna_proto.bounds import clean_text

_PAGE = 500
_MOST_CHARS = 64 * 1024


class EventLog:
    """Writes events in the transaction of what happened, and passes them to their followers."""

    def __init__(
        self,
        database: Database,
        now: Callable[[], float] = time.time,
        on_event: Callable[[EventRow], None] | None = None,
    ) -> None:
        """`on_event`: called with each event once it is committed."""
        self._database = database
        self._on_event = on_event
        self._now = now
        self._bell = Bell()
        self._closed = False
        self._log = structlog.get_logger("varuna.events")

    def emit_event(
        self,
        session: AsyncSession,
        kind: str,
        message: str,
        *,
        job_id: str | None = None,
        generation: int | None = None,
        vm_id: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Write the event when (and only when) the session's transaction commits."""
        row = EventRow(
            at=self._now(),
            job_id=job_id,
            generation=generation,
            vm_id=vm_id,
            kind=kind,
            message=clean_text(message, _MOST_CHARS),
            data=data or {},
        )
        session.add(row)
        after_commit(session, lambda: self._announce(row))

    def _announce(self, row: EventRow) -> None:
        bound = {
            "job": row.job_id,
            "generation": row.generation,
            "rank": row.data.get("rank"),
            "vm": row.vm_id,
        }
        self._log.info(row.message, kind=row.kind, **{key: value for key, value in bound.items() if value is not None})
        if self._on_event is not None:
            self._on_event(row)
        self._bell.notify_listeners()

    def close(self) -> None:
        """End every follower, because the manager stops."""
        self._closed = True
        self._bell.notify_listeners()

    async def list_events_after(
        self, after_id: int, *, job_id: str | None = None, kinds: Sequence[str] = (), limit: int = _PAGE
    ) -> list[EventRow]:
        """The events after `after_id`, oldest first; only of these kinds, if any are given."""
        query = select(EventRow).where(EventRow.id > after_id).order_by(EventRow.id).limit(limit)
        if job_id is not None:
            query = query.where(EventRow.job_id == job_id)
        if kinds:
            query = query.where(EventRow.kind.in_(kinds))
        async with self._database.read() as session:
            return list(await session.scalars(query))

    async def follow_events(
        self, after_id: int, *, kinds: Sequence[str] = (), keep_alive_s: float = 15.0
    ) -> AsyncIterator[EventRow | None]:
        """Every event after `after_id` (of these kinds), past and future; None each `keep_alive_s` without one."""
        rung = self._bell.add_listener()
        try:
            while not self._closed:
                rung.clear()
                rows = await self.list_events_after(after_id, kinds=kinds)
                for row in rows:
                    after_id = row.id
                    yield row
                if not rows and not await wait(rung, keep_alive_s):
                    yield None
        finally:
            self._bell.remove_listener(rung)
