"""A recorded trace that drives another provider, while several calls come at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from varuna_manager.providers.base import CreatedVms, ProviderNotice, ProviderVm, UnknownVmError, VmOffer
from varuna_manager.providers.replay import ReplayProvider, ReplaySettings
from varuna_planner.liveput.spot_trace import parse_trace
from waiting import until

TRACE = "0,add,n1\n0,add,n2\n0,add,n3\n10000,remove,n1\n20000,remove,n2\n30000,remove,n3\n"
"""Milliseconds, and what the market does."""


class SlowMarket:
    """VMs of which one is taken only when `may_take` is set."""

    name = "slow"
    is_elastic = True
    capacity: int | None = None

    def __init__(self) -> None:
        self.vms: list[str] = []
        self.taking: list[str] = []
        self.may_take = asyncio.Event()

    async def list(self) -> Sequence[ProviderVm]:
        return [ProviderVm(id=vm, gpus=1, device_memory_bytes=None, host="", created_at=0.0) for vm in self.vms]

    async def create(self, count: int, request: str) -> CreatedVms:
        self.vms = [f"vm-{number}" for number in range(1, count + 1)]
        return CreatedVms(vms=tuple(await self.list()))

    async def delete(self, vm_ids: Sequence[str]) -> None:
        raise AssertionError("only the trace takes VMs here")

    async def list_notices(self) -> Sequence[ProviderNotice]:
        return ()

    async def get_offer(self) -> VmOffer:
        return VmOffer(gpus=1)

    async def set_capacity(self, capacity: int | None) -> None:
        self.capacity = capacity

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        self.taking.append(vm_id)
        await self.may_take.wait()
        if vm_id not in self.vms:
            raise UnknownVmError(vm_id)
        self.vms.remove(vm_id)

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        raise FileNotFoundError(vm_id)

    async def list_ended_vms(self) -> Mapping[str, float]:
        return {}

    async def forget_vm(self, vm_id: str) -> None:
        pass

    async def close(self, *, end_vms: bool) -> None:
        pass


async def test_calls_that_come_at_once_play_each_change_of_the_trace_once(tmp_path: Path) -> None:
    market, clock = SlowMarket(), [1000.0]
    trace = parse_trace(TRACE, name="trace")
    replay = ReplayProvider(market, trace, ReplaySettings(), tmp_path / "replay.json", lambda: clock[0])
    assert len((await replay.create(3, "r")).vms) == 3
    clock[0] = 1010.0
    calls = [asyncio.create_task(replay.list()), asyncio.create_task(replay.list())]
    await until(lambda: market.taking, "the change under way")
    market.may_take.set()
    assert [[vm.id for vm in vms] for vms in await asyncio.gather(*calls)] == [["vm-2", "vm-3"]] * 2
    assert replay.next_change_at() == 1020.0, "the change after it"
    assert (market.taking, market.capacity) == (["vm-1"], 2)
