"""The database: SQLite (WAL) by default, PostgreSQL by URL.

The manager is one process and writes through one lock. That keeps SQLite's single writer from being refused, and
makes event ids grow in the order of their commits, which is what "events after this id" needs. Another process that
writes the same rows (a second manager on PostgreSQL) is caught by the rows' versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

_AFTER_COMMIT = "varuna_after_commit"


def normalised_url(url: str) -> str:
    """The URL with its async driver: `sqlite:` and `postgresql:` may come without.

    Raises ValueError for any other database.
    """
    scheme, separator, rest = url.partition("://")
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    name = scheme.split("+")[0]
    if not separator or name not in drivers:
        raise ValueError(f"database_url {url!r}: give sqlite:///path/to/file or postgresql://user@host/name")
    return f"{drivers[name]}://{rest}"


class Database:
    """Sessions and transactions over one engine. `close` it at the end."""

    def __init__(self, url: str) -> None:
        self.url = normalised_url(url)
        self.engine: AsyncEngine = create_async_engine(self.url)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine.sync_engine, "connect", _configure_sqlite)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session to look with; nothing is committed."""
        async with self._sessions() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed at the end of the block, rolled back when it raises. No network calls in it.

        Raises sqlalchemy.orm.exc.StaleDataError when a row was changed by somebody else since it was read.
        """
        async with self._writing:
            async with self._sessions() as session, session.begin():
                yield session
            for callback in session.info.get(_AFTER_COMMIT, ()):
                callback()

    async def migrate(self) -> None:
        """Bring the schema to the newest version."""
        async with self.engine.begin() as connection:
            await connection.run_sync(_upgrade)

    async def close(self) -> None:
        await self.engine.dispose()


def after_commit(session: AsyncSession, callback: Callable[[], None]) -> None:
    """Call `callback` once the session's transaction is committed; never when it is rolled back."""
    session.info.setdefault(_AFTER_COMMIT, []).append(callback)


def migration_config() -> Config:
    """Alembic's configuration, for the scripts inside this package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def _upgrade(connection: Connection) -> None:
    config = migration_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _configure_sqlite(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
