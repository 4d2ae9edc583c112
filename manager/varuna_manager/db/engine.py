"""The database: SQLite (WAL) by default, PostgreSQL by URL.

One manager writes, through one lock. That keeps SQLite's single writer from being refused, and makes event ids grow in
the order of their commits, which is what "events after this id" needs. That no other manager writes is seen to by a
lock on the file (SQLite, `varuna_manager.locks`) and by a fence (PostgreSQL, `varuna_manager.services.leadership`):
something that each transaction asks first, and that raises when somebody else leads.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import Connection, NullPool, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

import varuna_manager.db.job_progress  # noqa: F401 (no generation is written without it: it listens to the ORM)
from varuna_manager.db import schema

_AFTER_COMMIT = "varuna_after_commit"
_CONNECT_S = 5.0
_LOST_CLASSES = ("08", "57P", "53300")
"""SQLSTATEs: the connection is lost; the server shuts down, or is just starting; it takes no more connections."""
_FULL_CLASSES = ("53100",)
"""SQLSTATE: the server's disk is full."""
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
"""Of SQLite: what a disk that is full, or fails, makes it say. A full one may say any of the first three."""

Fence = Callable[[AsyncSession], Awaitable[None]]
"""Raises NotLeaderError when this manager must not write."""


class NotLeaderError(Exception):
    """This manager does not lead (any more), so nothing was written. `str()` says who leads, if that is known."""


class StoreAwayError(Exception):
    """The store cannot be reached. Nothing is known of what was being written: it may or may not be committed."""


class StoreFullError(StoreAwayError):
    """The store's disk takes no more, so nothing was written. What is there can still be read."""


def normalised_url(url: str) -> str:
    """The URL with its async driver: `sqlite:` and `postgresql:` may come without.

    Raises ValueError for any other database.
    """
    scheme, separator, rest = url.partition("://")
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    name = scheme.split("+")[0]
    if not separator or name not in drivers:
        # Its beginning only: the rest may hold a password.
        raise ValueError(f"database_url {scheme[:20]!r}...: give sqlite:///path/to/file or postgresql://user@host/name")
    return f"{drivers[name]}://{rest}"


@dataclass
class Outage:
    """Whether the store is away; shared by all that use it, so that the log tells of it once."""

    is_now: bool = False
    is_of_writes: bool = False
    """Only writing fails. Reading goes on meanwhile, and says nothing about its end."""


class Database:
    """Sessions and transactions over one engine. `close` it at the end.

    Args:
        fence: asked within every transaction that writes; None: nobody else can write.
        application_name: what PostgreSQL shows of our connections.
        outage: that of the process, where it has more than one Database.
    """

    def __init__(
        self,
        url: str,
        *,
        fence: Fence | None = None,
        application_name: str = "varuna",
        outage: Outage | None = None,
    ) -> None:
        self.url = normalised_url(url)
        self._fence = fence
        self._log = structlog.get_logger("varuna.store")
        self._outage = outage or Outage()
        self.engine: AsyncEngine = create_async_engine(self.url, **_engine_options(self.url, application_name))
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine.sync_engine, "connect", _configure_sqlite)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        self._writing = asyncio.Lock()

    @staticmethod
    def is_shared(url: str) -> bool:
        """Whether several managers can use it at once: all but files. Raises ValueError."""
        return not normalised_url(url).startswith("sqlite")

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session to look with; nothing is committed. Raises StoreAwayError."""
        with self._telling_when_away(writes=False):
            async with self._sessions() as session:
                await _connect(session)
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed at the end of the block, rolled back when it raises. No network calls in it.

        Raises sqlalchemy.orm.exc.StaleDataError when a row was changed by somebody else since it was read;
        NotLeaderError; StoreAwayError.
        """
        async with self._writing:
            with self._telling_when_away(writes=True):
                async with self._sessions() as session, session.begin():
                    await _connect(session)
                    if self._fence is not None:
                        await self._fence(session)
                    yield session
            for callback in session.info.get(_AFTER_COMMIT, ()):
                callback()

    async def migrate(self) -> None:
        """Bring the schema to the newest version, wholly or not at all; of managers that do so at once, one does.

        Raises schema.TooNewError when it is that of a later version of Varuna already; StoreAwayError.
        """
        engine = create_async_engine(self.url, poolclass=NullPool)
        if engine.dialect.name == "sqlite":
            event.listen(engine.sync_engine, "connect", _configure_sqlite_to_migrate)
            event.listen(engine.sync_engine, "begin", _begin_sqlite)
        with _raising_when_away():
            async with AsyncSession(engine) as session, session.begin():
                connection = await _connect(session)
                await connection.run_sync(schema.upgrade)

    async def close(self) -> None:
        await self.engine.dispose()

    @contextmanager
    def _telling_when_away(self, *, writes: bool) -> Iterator[None]:
        """Raises StoreAwayError; the log tells of the first of several, and of their end."""
        outage = self._outage
        try:
            with _raising_when_away():
                yield
        except StoreAwayError as error:
            if not outage.is_now:
                outage.is_now, outage.is_of_writes = True, isinstance(error, StoreFullError)
                self._log.warning("the store is away: trying again", error=str(error))
            raise
        if outage.is_now and (writes or not outage.is_of_writes):
            outage.is_now = False
            self._log.info("the store is back")


def after_commit(session: AsyncSession, callback: Callable[[], None]) -> None:
    """Call `callback` once the session's transaction is committed; never when it is rolled back."""
    session.info.setdefault(_AFTER_COMMIT, []).append(callback)


class _NoConnectionError(Exception):
    """The driver's or the system's own words on why there is no connection are its cause."""


async def _connect(session: AsyncSession) -> AsyncConnection:
    """The session's connection, taken now: only here do the system's errors mean that there is none."""
    try:
        return await session.connection()
    except OSError as error:  # a refused connection, a missing socket, a timeout
        raise _NoConnectionError(str(error) or type(error).__name__) from error


@contextmanager
def _raising_when_away() -> Iterator[None]:
    """Raises StoreAwayError for errors that say so."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(getattr(error, "orig", None) or error).split()) or type(error).__name__
        if _is_full(error):
            raise StoreFullError(f"the store cannot be written ({text}): make room on its disk") from error
        if _is_lost(error):
            raise StoreAwayError(f"the store cannot be reached: {text}") from error
        raise


def _is_full(error: Exception) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # without what makes it an extended one
    return code in _FULL_CODES or _sqlstate(error).startswith(_FULL_CLASSES)


def _is_lost(error: Exception) -> bool:
    """Whether it tells of a lost connection, or of none to be had: what the drivers say of it differs."""
    if isinstance(error, _NoConnectionError):
        return True
    if isinstance(error, DBAPIError) and (error.connection_invalidated or "connection is closed" in str(error.orig)):
        return True
    return _sqlstate(error).startswith(_LOST_CLASSES)


def _sqlstate(error: Exception) -> str:
    # While connecting, SQLAlchemy lets the errors of asyncpg through as they are.
    said_by = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(said_by, "sqlstate", None) or "")


def _engine_options(url: str, application_name: str) -> dict[str, Any]:
    # Errors are logged, and what a statement was given may be a secret.
    options: dict[str, Any] = {"hide_parameters": True}
    if url.startswith("postgresql"):
        settings = {"application_name": application_name}
        options["connect_args"] = {"server_settings": settings, "timeout": _CONNECT_S}
        options["pool_pre_ping"] = True  # a connection that the server has ended is replaced before it is used
    return options


def _configure_sqlite_to_migrate(connection: Any, record: Any) -> None:
    """Tables are changed by copying them, which no foreign key may forbid; all of it in one transaction."""
    _configure_sqlite(connection, record)
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=OFF")
    cursor.close()
    connection.isolation_level = None  # else the driver itself begins transactions, and not before DDL


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _configure_sqlite(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
