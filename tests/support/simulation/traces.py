"""What the tests of single state machines share: how many traces are played, and a store that is quick to fill."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, ClassVar, TypeVar

import structlog
from hypothesis import HealthCheck, settings
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from inline_sqlite import inline_sqlite
from varuna_manager.db.changes import name_changes
from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base

T = TypeVar("T")


def traces(few: int, *, steps: int) -> settings:
    """Settings for `few` traces of this many steps, or for VARUNA_TRACES traces (`make soak-traces`)."""
    return settings(
        max_examples=int(os.environ.get("VARUNA_TRACES", few)),
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Store:
    """The manager's tables in memory, for one trace after another; all that is logged meanwhile is dropped."""

    _open: ClassVar[Store | None] = None

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(inline_sqlite())
        self._runner = self._stack.enter_context(asyncio.Runner())
        self.database = Database("sqlite:///:memory:")
        self._logging = structlog.get_config()
        structlog.configure(processors=[_drop])
        self.run(self._make())

    @classmethod
    def empty(cls) -> Store:
        """The one of this process, emptied."""
        if cls._open is None:
            cls._open = Store()
        cls._open.run(cls._open._clear())
        return cls._open

    @classmethod
    def close(cls) -> None:
        if cls._open is not None:
            store, cls._open = cls._open, None
            store.run(store.database.close())
            store._stack.close()
            structlog.configure(**store._logging)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _make(self) -> None:
        async with self.database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    async def _clear(self) -> None:
        async with self.database.write() as session:
            for table in reversed(Base.metadata.sorted_tables):
                await session.execute(delete(table), execution_options=name_changes())  # before any World

    async def add(self, *rows: Base) -> None:
        async with self.database.write() as session:
            await _add(session, rows)


async def _add(session: AsyncSession, rows: tuple[Base, ...]) -> None:
    for row in rows:
        session.add(row)
        await session.flush()  # in this order: foreign keys


def _drop(logger: object, name: str, event: object) -> Any:
    raise structlog.DropEvent
