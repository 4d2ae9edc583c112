"""What keeps a manager from starting, and a store that goes away under one that runs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from cuttable_postgres import PostgresLine, postgres_line
from scripted_manager import ScriptedManager, start_training
from varuna_manager.db.engine import Database
from varuna_manager.errors import StartError
from varuna_manager.server.locks import hold_sqlite
from varuna_manager.server.process import run
from varuna_manager.settings import ManagerSettings
from waiting import DEADLINE_S, until


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "varuna_manager.main", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


async def test_what_keeps_it_from_starting_is_told_in_one_line(manager: ScriptedManager, tmp_path: Path) -> None:
    await manager.start()
    port = str(manager.rest.base_url.port)
    grpc_port = manager.grpc.rpartition(":")[2]
    elsewhere = ("--data-dir", str(tmp_path / "other"))
    assert manager.process is not None
    refused = {
        f"another manager (pid {manager.process.pid} on {socket.gethostname()})": await asyncio.to_thread(
            _run, "--data-dir", str(manager.data_dir)
        ),
        f"HTTP port {port}": await asyncio.to_thread(_run, *elsewhere, "--http-port", port, "--grpc-port", "0"),
        f"gRPC port {grpc_port}": await asyncio.to_thread(
            _run, *elsewhere, "--http-port", "0", "--grpc-port", grpc_port
        ),
        "give both --tls-cert": await asyncio.to_thread(_run, *elsewhere, "--host", "0.0.0.0", "--tls-cert", "x"),
    }
    for reason, outcome in refused.items():
        assert outcome.returncode != 0
        lines = outcome.stderr.strip().splitlines()
        assert len(lines) == 1, outcome.stderr
        assert reason in lines[0]


def test_a_store_is_held_by_one_manager_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "other.db").symlink_to(tmp_path / "real" / "manager.db")
    with hold_sqlite(f"sqlite:///{tmp_path}/real/manager.db"):
        for path in ("real/manager.db", "link/manager.db", "other.db", "real/../link/manager.db"):
            with pytest.raises(StartError, match=rf"another manager \(pid {os.getpid()} on .*real/manager.db: stop it"):
                hold_sqlite(f"sqlite:///{tmp_path}/{path}").__enter__()
        with hold_sqlite(f"sqlite:///{tmp_path}/real/another.db"):
            pass
    with hold_sqlite(f"sqlite+aiosqlite:///{tmp_path}/other.db"):
        pass
    for nothing_to_hold in ("sqlite://", "sqlite:///:memory:", "sqlite:///file:manager.db?uri=true"):
        with pytest.raises(StartError, match="give the path of a file"):
            hold_sqlite(nothing_to_hold).__enter__()


async def test_a_store_of_a_later_version_is_refused_in_one_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'newer.db'}"
    database = Database(url)
    await database.migrate_schema()
    async with database.engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await database.close()
    with pytest.raises(StartError, match="the store's schema is of revision 9999"):
        await run(_settings(tmp_path, url))


async def test_a_store_that_is_away_at_the_start_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="the store cannot be reached"):
        await run(_settings(tmp_path, "postgresql://nobody@127.0.0.1:1/none"))


def _settings(folder: Path, url: str) -> ManagerSettings:
    return ManagerSettings(data_dir=folder / "data", database_url=url, http_port=0, grpc_port=0)


@pytest.mark.xdist_group("postgres")
async def test_a_store_that_goes_away_stops_nothing_and_is_said_to_be_away(
    manager: ScriptedManager, postgres_url: str
) -> None:
    with postgres_line(postgres_url) as line:
        await _stay_while_the_store_is_away(manager, line)


async def _stay_while_the_store_is_away(manager: ScriptedManager, line: PostgresLine) -> None:
    # A lease that does not lapse meanwhile, however busy this machine is: another test covers that.
    flags = ("--database-url", line.url, "--default-checkpoint-url", "/tmp/checkpoints", "--leader-lease-s", "600")
    ((agent, launch),) = await start_training(manager, 1, flags=flags)
    line.cut()
    answer = await manager.rest.get("readyz")
    assert answer.status_code == 503
    assert "the store cannot be reached" in answer.json()["detail"]
    assert (await manager.rest.put("fleet", json={"target": 3})).status_code == 503
    agent.steps(launch, 4)
    before = agent.beats_acked
    await until(lambda: agent.beats_acked > before or agent.is_over, "the agent to be acknowledged, or let go")
    line.mend()

    async def is_ready() -> bool:
        return (await manager.rest.get("readyz")).status_code == 200

    await until(is_ready, "the store to be back")

    async def is_stored() -> bool:
        if agent.is_over:  # as an agent does, whenever it is let go
            await agent.close()
            await agent.connect()
        return not agent.unacked

    await until(is_stored, "what was reported meanwhile to be stored")
    job = await manager.get("jobs/train")
    assert (job["state"], job["generation"], job["step"]) == ("running", 2, 4)
    log = (manager.data_dir.parent / "manager.log").read_text()
    assert log.count("the store is away: trying again") == 1
    assert "Traceback" not in log
