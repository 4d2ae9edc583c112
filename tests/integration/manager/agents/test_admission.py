"""Which VMs are taken when their agents send Hello, although providers list them a few seconds late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from migrated_stores import migrated
from varuna_manager.agents.reports import ReportService
from varuna_manager.answers.errors import UnavailableError
from varuna_manager.db.engine import Database
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.providers.base import Provider
from varuna_manager.providers.slurm.jobs import JobMark
from varuna_manager.providers.slurm.provider import SlurmProvider
from varuna_manager.providers.slurm.settings import SlurmSettings
from varuna_manager.providers.static import StaticHost, StaticProvider
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S

VM = "varuna-8f1d-0-a"


class ScriptedSqueue:
    """Slurm's tools, where squeue shows one job of the fleet."""

    def __init__(self) -> None:
        self.state = "PENDING"
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask_tool(self, command: Sequence[str]) -> str:
        if command[0] != "squeue":
            return ""
        self.is_asked.set()
        await self.may_answer.wait()
        mark = JobMark(fleet="varuna", request="8f1d", slot=0, vm_id=VM)
        node = "n1" if self.state == "RUNNING" else "n/a"
        return f"7|{self.state}|None|900|1000|NONE|UNLIMITED|{node}|{mark}\n"


class Admissions:
    """A manager's service that admits agents. `now` is its clock, in seconds."""

    def __init__(self, database: Database) -> None:
        self.now = 1000.0
        self._database = database

    def serve(self, provider: Provider) -> FleetService:
        events, bell, now = EventLog(self._database), Bell(), lambda: self.now
        reports = ReportService(self._database, events, PlanningService(), bell)
        return FleetService(self._database, events, VmRegistry(now), provider, reports, bell, now)


@pytest.fixture
async def admissions(tmp_path: Path) -> AsyncIterator[Admissions]:
    migrated(tmp_path / "manager.db")
    database = Database(f"sqlite:///{tmp_path / 'manager.db'}")
    yield Admissions(database)
    await database.close()


def hello(vm_id: str) -> pb.Hello:
    return pb.Hello(vm_id=vm_id, incarnation="first", gpus=1, host="n1")


def slurm_provider(squeue: Any, admissions: Admissions, tmp_path: Path) -> SlurmProvider:
    async def make_script(vm_id: str) -> str:
        raise AssertionError("no job is submitted here")

    settings = SlurmSettings(
        partition="gpu", device="cpu", cpus=1, scratch_dir=str(tmp_path), log_dir=tmp_path / "logs", list_every_s=5.0
    )
    return SlurmProvider(settings, squeue, make_script, now=lambda: admissions.now)


async def test_a_vm_that_sends_hello_before_the_next_list_is_taken_with_that_list(
    admissions: Admissions, tmp_path: Path
) -> None:
    squeue = ScriptedSqueue()
    provider = slurm_provider(squeue, admissions, tmp_path)
    fleet = admissions.serve(provider)
    assert list(await provider.list()) == []
    squeue.state = "RUNNING"
    for _ in range(2):  # its agent dials again
        admissions.now += 2.0
        with pytest.raises(UnavailableError, match=f"no provider lists VM '{VM}' yet"):
            await fleet.admit_agent(hello(VM))
    admissions.now += 2.0
    assert await fleet.admit_agent(hello(VM)) is None


async def test_a_vm_that_no_list_has_for_long_is_refused_for_good(admissions: Admissions, tmp_path: Path) -> None:
    fleet = admissions.serve(slurm_provider(ScriptedSqueue(), admissions, tmp_path))
    with pytest.raises(UnavailableError):
        await fleet.admit_agent(hello("stranger"))
    admissions.now += 119.0
    with pytest.raises(UnavailableError):
        await fleet.admit_agent(hello("stranger"))
    admissions.now += 1.0
    assert "none of this manager's" in (await fleet.admit_agent(hello("stranger")) or "")


async def test_a_host_that_is_not_in_a_fixed_fleet_is_refused_at_once(admissions: Admissions) -> None:
    fleet = admissions.serve(StaticProvider([StaticHost(name="gpu-1")], began_at=1.0))
    assert "none of this manager's" in (await fleet.admit_agent(hello("gpu-9")) or "")


async def test_vms_that_the_store_has_do_not_wait_while_a_provider_is_asked_for_another(
    admissions: Admissions, tmp_path: Path
) -> None:
    squeue = ScriptedSqueue()
    squeue.state = "RUNNING"
    fleet = admissions.serve(slurm_provider(squeue, admissions, tmp_path))
    assert await fleet.admit_agent(hello(VM)) is None
    admissions.now += 60.0  # the next list is a new one
    squeue.is_asked.clear()
    squeue.may_answer.clear()
    restarted = pb.Hello(vm_id=VM, incarnation="second", gpus=1, host="n1")
    async with asyncio.timeout(DEADLINE_S):
        stranger, together = (asyncio.create_task(fleet.admit_agent(hello(vm_id))) for vm_id in ("stranger", VM))
        await squeue.is_asked.wait()
        assert await together is None
        assert await fleet.admit_agent(hello(VM)) is None
        assert await fleet.admit_agent(restarted) is None
        assert not stranger.done()
        squeue.may_answer.set()
        with pytest.raises(UnavailableError, match="no provider lists VM 'stranger' yet"):
            await stranger
