"""Of VMs of the local provider that are gone only the last logs stay on disk."""

from __future__ import annotations

import fcntl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from varuna_manager.providers import local
from varuna_manager.providers.local import LocalMachine, LocalProvider
from waiting import until


def fill(folder: Path) -> None:
    """What an agent leaves behind."""
    for path in ("workdirs/k/files/data", "checkpoints/j/step/part", "identity/identity.json", "jobs/j/g1/rank0.log"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text("text")
    (folder / "agent.lock").touch()
    (folder / "link").symlink_to(folder.parent)


@pytest_asyncio.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    machine = LocalMachine(agent_command=("/bin/sh", "-c", "exec sleep 600", "vm"))
    made = LocalProvider(tmp_path, "127.0.0.1:1", machine, None)
    yield made
    await made.close(end_vms=True)


async def test_of_a_vm_that_is_gone_the_logs_stay_and_of_old_ones_nothing(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_KEPT_LOGS", 1)
    vms = {vm.id: tmp_path / "vms" / vm.id for vm in (await provider.create(3, "r")).vms}
    for folder in vms.values():
        fill(folder)
    first, second, third = vms.values()
    everything = {path.name for path in third.iterdir()}
    await provider.delete([first.name])
    assert [vm.id for vm in await provider.list()] == [second.name, third.name]
    await until(lambda: {path.name for path in first.iterdir()} == {"vm.json", "agent.log", "jobs"})
    assert (first / "jobs" / "j" / "g1" / "rank0.log").read_text() == "text"
    await provider.delete([second.name])
    await provider.list()
    await until(lambda: not first.exists())
    await until(lambda: {path.name for path in second.iterdir()} == {"vm.json", "agent.log", "jobs"})
    assert {path.name for path in third.iterdir()} == everything, "it lives"


async def test_a_manager_that_starts_again_clears_what_is_left_but_not_where_an_agent_runs(
    provider: LocalProvider, tmp_path: Path
) -> None:
    gone, runs = (tmp_path / "vms" / vm.id for vm in (await provider.create(2, "r")).vms)
    for folder in (gone, runs):
        fill(folder)
    await provider.delete([gone.name, runs.name])
    with (runs / "agent.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its agent does, whatever the process table shows
        again = LocalProvider(tmp_path, "127.0.0.1:1", LocalMachine(), None)
        assert await again.list() == []
        await until(lambda: not (gone / "workdirs").exists())
        await again.close(end_vms=False)
        assert (runs / "workdirs" / "k" / "files" / "data").exists()
