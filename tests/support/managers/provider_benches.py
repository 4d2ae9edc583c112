"""Our providers over fakes of their services, for the suite that every provider must pass."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from fake_arm import FakeArm
from varuna_manager.providers.azure import AzureProvider
from varuna_manager.providers.azure_places import AzurePlace
from varuna_manager.providers.azure_requests import make_vm_body
from varuna_manager.providers.azure_settings import AzureSettings, AzureSize
from varuna_manager.providers.base import Provider, RefusalKind
from varuna_manager.providers.conformance import FixedBench, ProviderBench
from varuna_manager.providers.local import LocalMachine, LocalProvider
from varuna_manager.providers.replay import ReplayProvider, ReplaySettings
from varuna_manager.providers.static import StaticHost, StaticProvider
from varuna_planner.liveput.spot_trace import parse_trace
from waiting import DEADLINE_S, until

_PAUSES_S = 3600.0
"""Longer than any pause after a refusal."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------- local, replay


class LocalBench(ProviderBench):
    """Its VMs are real processes, which stop themselves instead of running an agent."""

    refusals = frozenset({RefusalKind.CAPACITY})
    gives_notices = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "data"
        self._tokens_left: int | None = None
        self.local = self._make_local()
        self.provider: Provider = self._make_provider()

    def _make_local(self) -> LocalProvider:
        machine = LocalMachine(agent_command=("/bin/sh", "-c", "kill -STOP $$", "vm"))
        return LocalProvider(self._folder, "127.0.0.1:1", machine, None, self._make_join_token)

    def _make_provider(self) -> Provider:
        return self.local

    async def _make_join_token(self, vm_id: str) -> str:
        if self._tokens_left is not None:
            self._tokens_left -= 1
            if self._tokens_left < 0:
                raise ConnectionError("the store does not answer")
        return "token"

    async def restart_provider(self) -> None:
        self.local = self._make_local()
        self.provider = self._make_provider()

    async def list_real_vms(self) -> Collection[str]:
        commands = [await _read_command(child) for child in psutil.Process().children()]
        ours = [command for command in commands if any(part.startswith(f"{self._folder}/") for part in command)]
        return {command[command.index("--vm-id") + 1] for command in ours}

    async def lose_next_answer(self) -> None:
        self._tokens_left = 1

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        await self.provider.list()  # a trace sets the capacity at its beginning
        await self.local.set_capacity(len(await self.list_real_vms()) + granted)

    async def end_refusals(self) -> None:
        await self.local.set_capacity(None)

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        await self.local.preempt_vm(vm_id, notice_s)

    async def cut_off(self) -> None:
        """The disk is gone."""
        (self._folder / "vms").rename(self._folder / "elsewhere")

    async def reconnect(self) -> None:
        self._tokens_left = None
        if (self._folder / "elsewhere").exists():
            (self._folder / "elsewhere").rename(self._folder / "vms")


async def _read_command(process: psutil.Process) -> list[str]:
    """The arguments of a process; none if it has ended. A process that has just begun its program has none yet."""
    try:
        return await until(process.cmdline, "the arguments of a process")
    except psutil.NoSuchProcess:
        return []


class ReplayBench(LocalBench):
    """Its trace is long and has many nodes, all from the start."""

    def _make_provider(self) -> Provider:
        trace = parse_trace("".join(f"0,add,n{node}\n" for node in range(40)) + "3600000,add,n99\n", name="trace")
        return ReplayProvider(self.local, trace, ReplaySettings(), self._folder / "replay.json")


@asynccontextmanager
async def open_local_bench(bench: LocalBench) -> AsyncIterator[LocalBench]:
    try:
        yield bench
    finally:
        await bench.reconnect()
        await bench.provider.close(end_vms=True)


# ---------------------------------------------------------------- static


class StaticBench(FixedBench):
    def __init__(self) -> None:
        self.provider = self._make()

    def _make(self) -> StaticProvider:
        return StaticProvider((StaticHost(name="gpu-1", gpus=8), StaticHost(name="gpu-2")), 1000.0)

    async def restart_provider(self) -> None:
        self.provider = self._make()


# ---------------------------------------------------------------- azure

_AZURE = AzureSettings(
    subscription_id="00000000-0000-0000-0000-000000000000",
    resource_group="training",
    location="westeurope",
    sizes=(AzureSize(name="Standard_A", gpus=1), AzureSize(name="Standard_B", gpus=1)),
    image="Canonical:ubuntu-24_04-lts:server:latest",
    subnet_id="/subnets/vms",
    ssh_public_key="ssh-ed25519 AAAA",
    list_every_s=0,
    retail_prices_url="",
)


async def _boot_script(name: str, size: AzureSize) -> str:
    return "#cloud-config\n"


class AzureBench(ProviderBench):
    refusals = frozenset({RefusalKind.CAPACITY, RefusalKind.QUOTA, RefusalKind.THROTTLED})

    def __init__(self) -> None:
        self.arm = FakeArm(url="http://arm.test")
        self._clock = Clock()
        self.providers: list[AzureProvider] = []
        self.provider = self._make()

    def _make(self) -> AzureProvider:
        client = self.arm.client_without_network(_AZURE, 0.0)
        made = AzureProvider(_AZURE, client, _boot_script, settle_s=DEADLINE_S, now=self._clock)
        self.providers.append(made)
        return made

    async def restart_provider(self) -> None:
        self.provider = self._make()

    async def list_real_vms(self) -> Collection[str]:
        return {name for name, vm in self.arm.vms.items() if "varuna-fleet" in vm.body["tags"]}

    async def advance(self) -> None:
        self.arm.settle()

    async def lose_next_answer(self) -> None:
        self.arm.answers_left = 0

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        if kind is RefusalKind.QUOTA:
            self.arm.quota = len(self.arm.vms) + granted
        elif kind is RefusalKind.THROTTLED:
            self.arm.throttle = [_PAUSES_S] * 100
        else:
            places: list[tuple[str, str | None]] = [(size.name, None) for size in _AZURE.sizes]
            there = [vm.place for vm in self.arm.vms.values()]
            self.arm.capacity = {place: there.count(place) for place in places}
            self.arm.capacity[places[0]] += granted

    async def end_refusals(self) -> None:
        self.arm.capacity, self.arm.quota, self.arm.throttle = {}, None, []
        self._clock.now += _PAUSES_S

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        self.arm.evict(vm_id)

    async def cut_off(self) -> None:
        self.arm.failures = [500] * sys.maxunicode

    async def reconnect(self) -> None:
        self.arm.failures, self.arm.answers_left = [], None

    async def add_stranger(self) -> str | None:
        other = _AZURE.model_copy(update={"scale_set": "theirs"})
        body: dict[str, Any] = make_vm_body(
            other, "stranger", AzurePlace(other.sizes[0], None), "", "", accelerated=False
        )
        self.arm.put_vm("stranger", {**body, "tags": {"owner": "somebody"}})
        return "stranger"


@asynccontextmanager
async def open_azure_bench() -> AsyncIterator[AzureBench]:
    bench = AzureBench()
    try:
        yield bench
    finally:
        for provider in bench.providers:
            await provider.close(end_vms=False)
