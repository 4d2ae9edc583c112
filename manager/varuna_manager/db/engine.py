"""The database: SQLite (WAL) by default, PostgreSQL by URL.

One manager writes, through one lock. The lock keeps SQLite from refusing a second writer, and makes event ids grow in
commit order, which "events after this id" needs. No other manager writes, because of a lock on the file (SQLite,
`varuna_manager.server.locks`) or a fence (PostgreSQL, `varuna_manager.world.leadership`): a check within each
transaction that raises when another manager leads.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import structlog
from sqlalchemy import Connection, ExceptionContext, NullPool, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

import varuna_manager.db.job_progress  # noqa: F401 (listens to the ORM: loaded before any generation is written)
from varuna_manager.db import schema
from varuna_manager.db.changes import ChangedRows, TrackedSession

_AFTER_COMMIT = "varuna_after_commit"
_CONNECT_S = 5.0
_CLOSE_S = 2.0
_LOST_CLASSES = ("08", "57P", "53300")
"""SQLSTATEs: connection lost; server shutting down or just starting; too many connections."""
_FULL_CLASSES = ("53100",)
"""SQLSTATE: the server's disk is full."""
_READ_ONLY_CLASSES = ("25006",)
"""SQLSTATE: the connection is read-only. A managed server is while its disk is nearly full; a standby always is."""
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
"""SQLite's errors when the disk is full or fails. A full disk may cause any of the first three."""

Fence = Callable[[AsyncSession], Awaitable[None]]
"""Raises NotLeaderError when this manager must not write."""


class NotLeaderError(Exception):
    """This manager does not lead, or no longer, so nothing was written. `str()` names the leader, if it is known."""


class StoreAwayError(Exception):
    """The store cannot be reached. A write that was under way may or may not be committed."""


class StoreFullError(StoreAwayError):
    """The store's disk is full, so nothing was written. Reading still works."""


class StoreReadOnlyError(StoreAwayError):
    """The store's server takes no writes for now, so nothing was written. Reading still works."""


class StoreLockedError(StoreAwayError):
    """Another process, a database shell say, keeps SQLite's file locked, so nothing was written. Reading works."""


def normalised_url(url: str) -> str:
    """The URL with its async driver; `sqlite:` and `postgresql:` may omit it. Raises ValueError for others."""
    scheme, separator, rest = url.partition("://")
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    name = scheme.split("+")[0]
    if not separator or name not in drivers:
        # only its beginning: the rest may hold a password
        raise ValueError(f"database_url {scheme[:20]!r}...: give sqlite:///path/to/file or postgresql://user@host/name")
    return f"{drivers[name]}://{rest}"


@dataclass
class Outage:
    """Whether the store is away; shared by all its users, so that it is logged once."""

    is_now: bool = False
    is_of_writes: bool = False
    """Only writing fails. Reading goes on, so a successful read does not end the outage."""
    number: int = 0
    """How many there have been. What began before an outage may still succeed during it, and does not end it."""


class Mirror(Protocol):
    """A copy of rows in memory that follows each transaction. Called by one transaction at a time."""

    async def read_changes(self, session: AsyncSession, changed: ChangedRows) -> Callable[[], None]:
        """Read the changed rows just before the commit. The returned function is called after the commit."""
        ...

    def drop_contents(self) -> None:
        """Forget everything, because it is not known whether a transaction was committed."""
        ...


class Database:
    """Sessions and transactions over one engine. `close` it at the end.

    Args:
        fence: called within every transaction that writes; None: no other process can write.
        application_name: shown by PostgreSQL for our connections.
        outage: that of the process, if it has more than one Database.
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
        self._options = _engine_options(self.url, application_name)
        self.engine: AsyncEngine = create_async_engine(self.url, **self._options)
        pool_log = self.engine.pool.logger
        assert isinstance(pool_log, logging.Logger), "SQLAlchemy has another kind for engines that echo"
        pool_log.addFilter(_is_no_cancellation)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine.sync_engine, "connect", _configure_sqlite)
        event.listen(self.engine.sync_engine, "handle_error", _drop_read_only_connections)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False, sync_session_class=TrackedSession)
        self._writing = asyncio.Lock()
        self._mirrors: WeakSet[Mirror] = WeakSet()

    def add_mirror(self, mirror: Mirror) -> None:
        """Let a copy in memory follow the commits through this Database."""
        self._mirrors.add(mirror)

    @staticmethod
    def is_shared(url: str) -> bool:
        """Whether several managers can use the database at once: any but files. Raises ValueError."""
        return not normalised_url(url).startswith("sqlite")

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session for reading; nothing is committed. Raises StoreAwayError."""
        with self._log_outage(writes=False):
            async with self._sessions() as session:
                await _connect(session)
                yield session

    @asynccontextmanager
    async def read_snapshot(self) -> AsyncIterator[AsyncSession]:
        """A session for reading in which all queries see the store of one moment. Raises StoreAwayError."""
        with self._log_outage(writes=False):
            async with self._sessions() as session:
                if self.engine.dialect.name == "sqlite":
                    # The driver begins no transaction for a SELECT, so each would see another moment.
                    await (await _connect(session)).exec_driver_sql("BEGIN")
                else:
                    await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed at the end of the block, rolled back when it raises. No network calls in it.

        Raises sqlalchemy.orm.exc.StaleDataError when a row was changed by somebody else since it was read;
        NotLeaderError; StoreAwayError.
        """
        async with self._writing:
            with self._log_outage(writes=True), self._guard_mirrors() as commit:
                async with self._sessions() as session, session.begin():
                    await _connect(session)
                    if self._fence is not None:
                        await self._fence(session)
                    yield session
                    await commit.prepare_updates(session)
            for callback in (*commit.updates, *session.info.get(_AFTER_COMMIT, ())):
                callback()

    @asynccontextmanager
    async def read_alone(self) -> AsyncIterator[AsyncSession]:
        """A session for reading, during which nothing is committed through this Database. Raises StoreAwayError."""
        async with self._writing, self.read() as session:
            yield session

    async def migrate_schema(self) -> None:
        """Bring the schema to the newest version, wholly or not at all; of managers that do so at once, one does.

        Raises schema.TooNewError when it is that of a later version of Varuna already; StoreAwayError.
        """
        engine = create_async_engine(self.url, **self._options, poolclass=NullPool)
        if engine.dialect.name == "sqlite":
            event.listen(engine.sync_engine, "connect", _configure_sqlite_to_migrate)
            event.listen(engine.sync_engine, "begin", _begin_sqlite)
        with _raising_when_away():
            async with AsyncSession(engine) as session, session.begin():
                connection = await _connect(session)
                await connection.run_sync(schema.upgrade)

    async def close(self) -> None:
        """Close all connections; those of a server that does not answer, within seconds and without its word."""
        limit_s = _CLOSE_S if self.is_shared(self.url) else None
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    return await self.engine.dispose()
            except TimeoutError:
                limit_s = 0.0  # the one that was waited for is closed, and out of the pool

    @contextmanager
    def _guard_mirrors(self) -> Iterator[_Commit]:
        """Drop the copies in memory when it is not known whether the transaction was committed."""
        commit = _Commit(self._mirrors)
        try:
            yield commit
        except BaseException:
            if commit.is_prepared:
                for mirror in commit.mirrors:
                    mirror.drop_contents()
            raise

    @contextmanager
    def _log_outage(self, *, writes: bool) -> Iterator[None]:
        """Raises StoreAwayError; logs the beginning and the end of an outage, once each."""
        outage = self._outage
        began_in = outage.number
        try:
            with _raising_when_away():
                yield
        except StoreAwayError as error:
            if not outage.is_now:
                outage.is_now = True
                outage.is_of_writes = isinstance(error, StoreFullError | StoreReadOnlyError | StoreLockedError)
                outage.number += 1
                self._log.warning("the store is away: trying again", error=str(error))
            raise
        if outage.is_now and outage.number == began_in and (writes or not outage.is_of_writes):
            outage.is_now = False
            self._log.info("the store is back")


class _Commit:
    """One transaction's updates of the copies in memory."""

    def __init__(self, mirrors: Iterable[Mirror]) -> None:
        self.mirrors = tuple(mirrors)
        self.is_prepared = False
        """Only the commit itself remains."""
        self.updates: list[Callable[[], None]] = []

    async def prepare_updates(self, session: AsyncSession) -> None:
        await session.flush()
        sync_session = session.sync_session
        assert isinstance(sync_session, TrackedSession)
        if changed := sync_session.changed_rows:
            self.updates = [await mirror.read_changes(session, changed) for mirror in self.mirrors]
        self.is_prepared = True


def after_commit(session: AsyncSession, callback: Callable[[], None]) -> None:
    """Call `callback` once the session's transaction is committed; never when it is rolled back."""
    session.info.setdefault(_AFTER_COMMIT, []).append(callback)


class _NoConnectionError(Exception):
    """There is no connection. Its cause is the driver's or the system's error."""


async def _connect(session: AsyncSession) -> AsyncConnection:
    """Open the session's connection. Only here does an OSError mean that there is none."""
    try:
        return await session.connection()
    except OSError as error:  # a refused connection, a missing socket, a timeout
        raise _NoConnectionError(str(error) or type(error).__name__) from error


@contextmanager
def _raising_when_away() -> Iterator[None]:
    """Raises StoreAwayError for errors that mean it."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(getattr(error, "orig", None) or error).split()) or type(error).__name__
        code = _sqlite_code(error)
        if code in _FULL_CODES or _sqlstate(error).startswith(_FULL_CLASSES):
            raise StoreFullError(f"the store cannot be written ({text}): make room on its disk") from error
        if _sqlstate(error).startswith(_READ_ONLY_CLASSES):
            raise StoreReadOnlyError(
                f"the store cannot be written ({text}): make room on its server's disk, or let --database-url lead to "
                "a server that takes writes"
            ) from error
        if code == sqlite3.SQLITE_BUSY:
            raise StoreLockedError(
                f"the store cannot be written ({text}): end the transaction of the other process that uses its file"
            ) from error
        if _is_lost(error):
            raise StoreAwayError(f"the store cannot be reached: {text}") from error
        raise


def _sqlite_code(error: Exception) -> int | None:
    code = getattr(error.orig, "sqlite_errorcode", None) if isinstance(error, DBAPIError) else None
    return None if code is None else code & 0xFF  # without the bits that make it an extended code


def _is_lost(error: Exception) -> bool:
    """Whether the error means that the connection is lost or cannot be made. Drivers report that differently."""
    if isinstance(error, _NoConnectionError):
        return True
    if isinstance(error, DBAPIError) and (error.connection_invalidated or "connection is closed" in str(error.orig)):
        return True
    return _sqlstate(error).startswith(_LOST_CLASSES)


def _sqlstate(error: BaseException) -> str:
    # While connecting, SQLAlchemy lets the errors of asyncpg through as they are.
    driver_error = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(driver_error, "sqlstate", None) or "")


def _engine_options(url: str, application_name: str) -> dict[str, Any]:
    # Errors are logged, and a statement's parameters may be secret.
    options: dict[str, Any] = {"hide_parameters": True}
    if url.startswith("postgresql"):
        settings = {"application_name": application_name}
        options["connect_args"] = {"server_settings": settings, "timeout": _CONNECT_S}
        options["pool_pre_ping"] = True  # a connection that the server has ended is replaced before it is used
    else:
        options["connect_args"] = {"factory": _SqliteConnection}
    return options


def _drop_read_only_connections(context: ExceptionContext) -> None:
    """A connection may stay read-only when the server, or the address, takes writes again: only a new one shows it."""
    if _sqlstate(context.original_exception).startswith(_READ_ONLY_CLASSES):
        context.is_disconnect = True  # the pool then replaces all that it has


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """A task that is cancelled while its connection goes back to the pool, as when an agent's stream ends, is no fault:
    the pool closes the connection, and the next task gets another."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class _SqliteConnection(sqlite3.Connection):
    """Ends its transaction when it is closed, as when a task is cancelled in the middle of one.

    SQLite itself keeps the transaction, and so the file locked, until the last statement is freed; the traceback of a
    cancelled task keeps those that it had begun.
    """

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()
        super().close()


def _configure_sqlite_to_migrate(connection: Any, record: Any) -> None:
    """SQLite changes a table by copying it, so foreign keys are off; the migration is one transaction."""
    _configure_sqlite(connection, record)
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=OFF")
    cursor.close()
    connection.isolation_level = None  # otherwise the driver begins transactions itself, and not before DDL


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _configure_sqlite(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
