"""The log says once that the store is away, and once that it is back."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from structlog.testing import capture_logs

from varuna_manager.db import engine
from varuna_manager.db.engine import Database, Outage, StoreAwayError, StoreLockedError
from waiting import DEADLINE_S


async def test_what_began_before_an_outage_does_not_end_it(tmp_path: Path) -> None:
    outage = Outage()
    there = Database(f"sqlite:///{tmp_path / 'there.db'}", outage=outage)
    away = Database("postgresql://nobody@127.0.0.1:1/none", outage=outage)

    async def fail() -> None:
        with pytest.raises(StoreAwayError):
            async with away.read():
                pass

    with capture_logs() as log:
        async with there.read():  # its answer is on the way already
            await fail()
        await fail()
        async with there.read():
            pass
    assert [line["event"] for line in log] == ["the store is away: trying again", "the store is back"]
    await there.close()
    await away.close()


async def test_a_file_that_another_process_keeps_locked_can_be_read_and_ends_the_outage_when_it_can_be_written(
    tmp_path: Path,
) -> None:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    await database.migrate_schema()

    def wait_briefly(connection: Any, record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA busy_timeout=10")
        cursor.close()

    async def write() -> None:
        async with database.write() as session:
            await (await session.connection()).exec_driver_sql("DELETE FROM events")

    event.listen(database.engine.sync_engine, "connect", wait_briefly)
    shell = sqlite3.connect(tmp_path / "store.db")
    shell.execute("BEGIN IMMEDIATE")
    with capture_logs() as log:
        for _ in range(2):
            with pytest.raises(StoreLockedError, match=r"database is locked.*end the transaction of the other process"):
                await write()
            async with database.read() as session:
                assert (await (await session.connection()).exec_driver_sql("SELECT count(*) FROM events")).scalar() == 0
        shell.close()
        await write()
    assert [line["event"] for line in log] == ["the store is away: trying again", "the store is back"]
    await database.close()


async def test_a_server_that_does_not_answer_is_away_also_for_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        database = Database(f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/none")
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(StoreAwayError):
                async with database.read():
                    pass
            with pytest.raises(StoreAwayError):
                await database.migrate_schema()
        await database.close()
