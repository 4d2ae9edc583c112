"""Reads the event log by job, VM, kind and time, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.engine import Database
from varuna_manager.db.models import EventRow, JobRow
from varuna_manager.history.documents import make_event_document
from varuna_manager.jobs.jobs import find_job_row
from varuna_proto.rest import EventDocument

_NAMES_KEPT = 10_000


@dataclass(frozen=True, kw_only=True)
class EventFilter:
    """None, or no kinds: any. `after` and `before`: ids, both exclusive."""

    job: str | None = None
    """Name or id."""
    vm_id: str | None = None
    kinds: Sequence[str] = ()
    since: float | None = None
    until: float | None = None
    after: int = 0
    before: int | None = None
    text: str | None = None
    """A part of its message, in any case."""


class EventList:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._names: dict[str, str] = {}
        """By job id."""

    async def list_events(
        self, wanted: EventFilter, *, descending: bool, limit: int
    ) -> tuple[list[EventDocument], bool]:
        """The wanted events by id, and whether there are more. Raises MissingError for an unknown job."""
        async with self._database.read() as session:
            return await self.read_events(session, wanted, descending=descending, limit=limit)

    async def read_events(
        self, session: AsyncSession, wanted: EventFilter, *, descending: bool, limit: int
    ) -> tuple[list[EventDocument], bool]:
        """Like `list_events`."""
        names = select(EventRow, JobRow.name).outerjoin(JobRow, JobRow.id == EventRow.job_id)
        query = names.where(EventRow.id > wanted.after)
        if wanted.job is not None:
            query = query.where(EventRow.job_id == (await find_job_row(session, wanted.job)).id)
        if wanted.before is not None:
            query = query.where(EventRow.id < wanted.before)
        if wanted.vm_id is not None:
            query = query.where(EventRow.vm_id == wanted.vm_id)
        if wanted.kinds:
            query = query.where(EventRow.kind.in_(wanted.kinds))
        if wanted.since is not None:
            query = query.where(EventRow.at >= wanted.since)
        if wanted.until is not None:
            query = query.where(EventRow.at < wanted.until)
        if wanted.text is not None:
            query = query.where(EventRow.message.icontains(wanted.text, autoescape=True))
        query = query.order_by(EventRow.id.desc() if descending else EventRow.id).limit(limit + 1)
        rows = (await session.execute(query)).all()
        return [make_event_document(row, name) for row, name in rows[:limit]], len(rows) > limit

    async def find_job_name(self, job_id: str | None) -> str | None:
        """The name of an event's job, as `EventDocument` has it. A job never changes its name."""
        if job_id is None:
            return None
        if job_id not in self._names:
            async with self._database.read() as session:
                name = await session.scalar(select(JobRow.name).where(JobRow.id == job_id))
            if name is None:
                return None
            if len(self._names) >= _NAMES_KEPT:
                self._names.clear()
            self._names[job_id] = name
        return self._names[job_id]

    async def list_kinds(self) -> list[str]:
        """The kinds that have occurred, in alphabetical order."""
        # The query steps from kind to kind by the index. DISTINCT would read every event.
        found = select(func.min(EventRow.kind).label("kind")).cte("found", recursive=True)
        following = select(func.min(EventRow.kind)).where(EventRow.kind > found.c.kind).scalar_subquery()
        found = found.union_all(select(following).where(found.c.kind.is_not(None)))
        async with self._database.read() as session:
            return list(await session.scalars(select(found.c.kind).where(found.c.kind.is_not(None))))

    async def find_newest_id(self) -> int:
        """The id of the newest event; 0: there is none."""
        async with self._database.read() as session:
            return await session.scalar(select(EventRow.id).order_by(EventRow.id.desc()).limit(1)) or 0
