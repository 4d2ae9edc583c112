"""Which rows a transaction changes, of the tables that the manager also holds in memory (`varuna_manager.world`).

Writes through the ORM are detected automatically. A plain UPDATE, INSERT or DELETE on one of these tables must name the
rows that it changes (`name_changes`). Otherwise it is refused, because the copy in memory would not follow it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from sqlalchemy import Delete, Insert, Update, event
from sqlalchemy.orm import ORMExecuteState, Session, UOWTransaction

from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow

GenerationKey = tuple[str, int]
"""Job and number."""
WorkerKey = tuple[str, int, int]
"""Job, generation and rank."""

_CHANGED = "varuna_changed_rows"
_TABLES = frozenset(row.__tablename__ for row in (GenerationRow, JobRow, VmRow, WorkerRow))


@dataclass
class ChangedRows:
    """Keys of rows that were inserted, changed or deleted."""

    vms: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    generations: set[GenerationKey] = field(default_factory=set)
    workers: set[WorkerKey] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.vms or self.jobs or self.generations or self.workers)


class TrackedSession(Session):
    """A session that records which of these rows it has changed."""

    @property
    def changed_rows(self) -> ChangedRows:
        changed: ChangedRows = self.info.setdefault(_CHANGED, ChangedRows())
        return changed


def name_changes(*, generations: Iterable[GenerationKey] = ()) -> dict[str, Any]:
    """Execution options of a plain statement that changes these generations.

    It must not change VMs, or jobs and workers that are not over.
    """
    return {_CHANGED: frozenset(generations), "synchronize_session": False}


@event.listens_for(TrackedSession, "after_flush")
def _add_flushed(session: TrackedSession, context: UOWTransaction) -> None:
    changed = session.changed_rows
    for row in chain(session.new, session.dirty, session.deleted):
        match row:
            case VmRow():
                changed.vms.add(row.id)
            case JobRow():
                changed.jobs.add(row.id)
            case GenerationRow():
                changed.generations.add((row.job_id, row.number))
            case WorkerRow():
                changed.workers.add((row.job_id, row.generation, row.rank))


@event.listens_for(TrackedSession, "do_orm_execute")
def _add_named(state: ORMExecuteState) -> None:
    statement = state.statement
    if not isinstance(statement, Update | Insert | Delete) or getattr(statement.table, "name", "") not in _TABLES:
        return
    named = state.execution_options.get(_CHANGED)
    if named is None:
        raise TypeError(f"a plain statement must name the rows of {statement.table} that it changes: {statement}")
    assert isinstance(state.session, TrackedSession)
    state.session.changed_rows.generations.update(named)
