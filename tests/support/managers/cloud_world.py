"""The real fleet controller and Azure provider over a real store, in virtual time; Azure is a fake one in-process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from sqlalchemy import select

from fake_arm import FakeArm
from inline_sqlite import inline_sqlite
from manager_death import ManagerDiedError
from migrated_stores import migrated
from varuna_manager.agents.reports import ReportService
from varuna_manager.controllers.fleet_controller import FleetController
from varuna_manager.controllers.vm_requests import FleetSettings
from varuna_manager.db.engine import Database
from varuna_manager.db.models import EventRow, VmRow
from varuna_manager.domain.fleet_decision import FleetLimits
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.retention import KeepDays
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.history.fleet_history import FleetHistoryService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.providers.azure import AzureProvider
from varuna_manager.providers.azure_settings import AzureSettings, AzureSize
from varuna_manager.providers.base import CreatedVms
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from varuna_proto.v1 import agent_pb2 as pb

A100, V100 = "Standard_NC24ads_A100_v4", "Standard_NC6s_v3"
SETTINGS = AzureSettings(
    subscription_id="00000000-0000-0000-0000-000000000000",
    resource_group="training",
    location="westeurope",
    sizes=(AzureSize(name=A100, gpus=1, zones=("1", "2")), AzureSize(name=V100, gpus=1, zones=("1",))),
    image="Canonical:ubuntu-24_04-lts:server:latest",
    subnet_id="/subnets/vms",
    ssh_public_key="ssh-ed25519 AAAA",
    retail_prices_url="",
)
BOOT_S = 60.0
_LOOKS_IN_A_ROW = 20
_POLL_S = 5.0
"""Between two polls of an operation by the SDK."""
_BEGAN_AT = 1_800_000_000.0


async def boot_script(name: str, size: AzureSize) -> str:
    return "#cloud-config\n"


class MortalProvider(AzureProvider):
    """The manager dies, once, before or after it has asked Azure for VMs."""

    dies: str = ""

    async def create(self, count: int, request: str) -> CreatedVms:
        self._maybe_die("before")
        created = await super().create(count, request)
        self._maybe_die("after")
        return created

    def _maybe_die(self, when: str) -> None:
        if self.dies == when:
            raise ManagerDiedError


class CloudWorld:
    """Its clock is that of the event loop, a virtual one, which `clock_set_by_s` sets the wall clock against."""

    def __init__(self, folder: Path, arm: FakeArm, limits: FleetLimits) -> None:
        self.arm, self.limits = arm, limits
        self.deaths, self.clock_set_by_s = 0, 0.0
        arm.clock = self.read_clock
        self._url = f"sqlite:///{folder / 'manager.db'}"
        migrated(folder / "manager.db")
        self._joined: set[str] = set()

    def read_clock(self) -> float:
        return _BEGAN_AT + asyncio.get_running_loop().time() + self.clock_set_by_s

    async def start(self) -> None:
        """A new manager over the same store."""
        now = self.read_clock
        database, rules = Database(self._url), Rules(request_timeout_s=1200.0)
        bell, events, self._registry = Bell(), EventLog(database, now), VmRegistry(asyncio.get_running_loop().time)
        client = self.arm.client_without_network(SETTINGS, _POLL_S)
        self.provider = MortalProvider(
            SETTINGS, client, boot_script, needs_prices=self.limits.max_cost_per_hour is not None, now=now
        )
        reports = ReportService(database, events, PlanningService(), bell, now)
        self.fleet = FleetService(database, events, self._registry, self.provider, reports, bell, now)
        self._controller = FleetController(
            database, World(database, self._registry, now), self.fleet, events, bell,
            FleetSettings(rules=rules, limits=self.limits), now=now, chance=Random(self.deaths),
        )  # fmt: skip
        self._database = database

    async def stop(self) -> None:
        await self._controller.close()
        await self.provider.close(end_vms=False)
        await self._database.close()

    async def run(self, seconds: float, step_s: float = 15.0) -> None:
        """Let virtual time pass. A manager that dies is started again."""
        end = self.read_clock() + seconds
        while self.read_clock() < end:
            try:
                await self._look()
            except ManagerDiedError:
                self.deaths += 1
                await self.stop()
                self._joined.clear()
                await self.start()
            await asyncio.sleep(step_s)  # so that concurrent requests to Azure go on
            self.arm.settle()
            await self._agents()

    async def run_until_settled(self, vms: int, deadline_s: float = 3600.0) -> None:
        """Wait until the store has this many ready VMs and Azure has the same ones and nothing else."""
        end = self.read_clock() + deadline_s
        while not (self.arm.vms.keys() == {*await self.ready()} and len(self.arm.vms) == vms):
            states = {vm.name: vm.state for vm in self.arm.vms.values()}
            assert self.read_clock() < end, f"{await self.states()} in the store, {states} at Azure\n{await self.log()}"
            await self.run(15.0)

    async def give_notice(self, name: str) -> None:
        """As the VM's agent reports it: Azure takes the VM in half a minute."""
        async with self._database.write() as session:
            await self.fleet.note_notice(session, name, f"notice-{name}", self.read_clock() + 30.0)

    async def _look(self) -> None:
        for _ in range(_LOOKS_IN_A_ROW):
            if await self._controller.reconcile_once() > 0:
                return
        raise AssertionError(f"the fleet controller never comes to rest\n{await self.log()}")

    async def _agents(self) -> None:
        """Agents of VMs that are up send Hello and heartbeats; those of VMs that are gone are silent."""
        up = {vm.name for vm in [*self.arm.vms.values()] if vm.state == "Succeeded"}
        for name in self._joined - up:
            self._registry.add_disconnect(name)
        self._joined &= up
        for name in sorted(up - self._joined):
            if self.read_clock() >= self.arm.vms[name].created_at + BOOT_S and await self._admitted(name):
                self._registry.add_hello(name, rendezvous_port=1, workers=())
                self._joined.add(name)
        for name in self._joined:
            self._registry.add_heartbeat(name, rendezvous_port=1, workers=())

    async def _admitted(self, name: str) -> bool:
        hello = pb.Hello(vm_id=name, incarnation="1", gpus=1, host="10.20.16.4")
        return await self.fleet.admit_agent(hello) is None

    # ------------------------------------------------------------ what is so

    async def states(self) -> Mapping[str, str]:
        """Of the VMs that are not gone, by the store."""
        async with self._database.read() as session:
            rows = await session.execute(select(VmRow.id, VmRow.state).where(VmRow.state != "gone"))
            return dict(rows.all())

    async def ready(self) -> list[str]:
        return [vm_id for vm_id, state in (await self.states()).items() if state == "ready"]

    async def cost(self) -> float:
        """Of the fleet since its first VM; 0: no price is known."""
        return (await FleetHistoryService(self._database, KeepDays(), self.read_clock).read_cost(None))["cost"] or 0.0

    async def log(self) -> str:
        async with self._database.read() as session:
            rows: Any = await session.execute(select(EventRow.at, EventRow.message).order_by(EventRow.id))
            return "\n".join(f"{at - _BEGAN_AT:8.0f} {message}" for at, message in rows)


@asynccontextmanager
async def held_answer(provider: AzureProvider, call: str) -> AsyncIterator[None]:
    """The provider's answers to this call arrive at the end."""
    may_arrive, answer = asyncio.Event(), getattr(provider, call)

    async def hold(*arguments: Any) -> Any:
        await may_arrive.wait()
        return await answer(*arguments)

    with patch.object(provider, call, hold):
        try:
            yield
        finally:
            may_arrive.set()


@asynccontextmanager
async def cloud_world(folder: Path, limits: FleetLimits | None = None) -> AsyncIterator[CloudWorld]:
    """A world in which nothing has happened. At its end no limit may have been exceeded."""
    with inline_sqlite():
        arm = FakeArm(url="http://azure.test")
        world = CloudWorld(folder, arm, limits or FleetLimits())
        await world.start()
        try:
            yield world
            if world.limits.max_vms is not None:
                assert arm.most_vms <= world.limits.max_vms, await world.log()
            if world.limits.max_cost_per_hour is not None:
                assert arm.most_cost <= world.limits.max_cost_per_hour + 1e-9, await world.log()
        finally:
            await world.stop()
