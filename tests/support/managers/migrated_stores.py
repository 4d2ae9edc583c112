"""Empty stores with the newest schema, copied from one that each process migrates once.

All migrations take half a second of CPU, which was most of what many tests took. `test_migrations.py` and the managers
of the end-to-end tests still go through them.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from varuna_manager.db.engine import Database


def migrated_url(request: pytest.FixtureRequest, folder: Path) -> str:
    """The address of a store of the test's own, on what the fixture's parameter names: `sqlite` or `postgresql`."""
    if request.param == "postgresql":
        return migrated_postgres(request.getfixturevalue("postgres_server"))
    path = folder / "manager.db"
    migrated(path)
    return f"sqlite:///{path}"


def migrated(path: Path) -> None:
    """Make an empty store at `path`, with SQLite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # as the manager does
    path.write_bytes(_migrated_file())


def migrated_postgres(server: Any) -> str:
    """The address of an empty database of a PostgreSQL server (`postgres_server`)."""
    name = f"test_{uuid.uuid4().hex}"
    server.psql(f"CREATE DATABASE {name} TEMPLATE {_migrated_database(server)}")
    url: str = server.get_uri(name)
    return url


@cache
def _migrated_file() -> bytes:
    with tempfile.TemporaryDirectory(prefix="varuna-store-") as folder:
        path = Path(folder) / "manager.db"
        _run_apart(f"sqlite:///{path}")
        return path.read_bytes()


@cache
def _migrated_database(server: Any) -> str:
    name = f"migrated_{uuid.uuid4().hex}"
    server.psql(f"CREATE DATABASE {name}")
    _run_apart(server.get_uri(name))
    return name


def _run_apart(url: str) -> None:
    """In another thread, because the caller's may run an event loop."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(_migrate(url))).result()


async def _migrate(url: str) -> None:
    database = Database(url)
    await database.migrate_schema()
    if url.startswith("sqlite"):
        async with database.engine.connect() as connection:
            await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")  # so that the file is all of it
    await database.close()
