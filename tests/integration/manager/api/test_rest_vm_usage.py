"""The usage of VMs over time: from samples to the store and REST."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrated_stores import migrated
from rest_world import rest_world, vm
from varuna_manager.db.models import VmRow, VmUsageRow
from varuna_manager.fleet.vm_usage import UsageBoard, UsageKeeper, UsageList
from varuna_proto.v1 import agent_pb2 as pb

pytestmark = [pytest.mark.asyncio, pytest.mark.xdist_group("rest")]


def sample(cpu_share: float) -> pb.MachineUsage:
    gpus = [pb.GpuUsage(busy_share=cpu_share / 2, memory_used_bytes=1 << 30, memory_bytes=4 << 30)] * 2
    return pb.MachineUsage(cpu_share=cpu_share, memory_used_bytes=3 << 30, memory_bytes=8 << 30, gpus=gpus)


async def test_samples_become_points_that_outlive_the_manager_and_go_with_their_vm(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    now = 1000.0
    async with rest_world(tmp_path) as world:
        assert (await world.ask("GET", "/api/v1/vms/nobody/usage")).status_code == 404
        await world.add(vm("vm-1"), vm("vm-2"))
        empty = (await world.ask("GET", "/api/v1/vms/vm-1/usage")).json()
        assert empty["at_unix_s"] == empty["cpu_share"] == []
        board = UsageBoard(lambda: now)
        keeper = UsageKeeper(world.database, board)
        for number in range(100):
            now = 1000.0 + 5.0 * number
            board.record_sample("vm-1", sample(0.2 if number % 2 else 0.4))
            board.record_sample("vm-nobody", sample(0.5))
            await keeper.reconcile_once()
        found = await UsageList(world.database, board).read_usage("vm-1")
        assert found["at_unix_s"][0] == 1005.0  # three samples are one point
        assert found["at_unix_s"][-1] == now
        assert found["cpu_share"][0] == pytest.approx((0.4 + 0.2 + 0.4) / 3)
        assert found["gpu_share"][0] == pytest.approx((0.2 + 0.1 + 0.2) / 3)
        assert set(found["gpu_memory_used_bytes"]) == {2.0 * (1 << 30)}
        stored = (await world.ask("GET", "/api/v1/vms/vm-1/usage")).json()["at_unix_s"]  # as the next manager reads it
        assert stored == found["at_unix_s"][: len(stored)]
        assert now - stored[-1] < 90.0
        assert (await world.ask("GET", "/api/v1/vms/vm-2/usage")).json()["at_unix_s"] == []


async def test_what_an_agent_makes_up_is_bounded(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        await world.add(vm("vm-1"))
        board = UsageBoard(lambda: 1.0)
        wild = pb.MachineUsage(cpu_share=1e300, received_bytes_per_s=float("inf"), sent_bytes_per_s=float("nan"))
        board.record_sample("vm-1", wild)
        found = await UsageList(world.database, board).read_usage("vm-1")
        assert (found["cpu_share"], found["sent_bytes_per_s"]) == ([1.0], [None])
        assert found["received_bytes_per_s"] == [2.0**60]
        async with world.database.write() as session:
            session.add(VmUsageRow(vm_id="vm-1", points=b""))
        async with world.database.read() as session:
            assert await session.get(VmRow, "vm-1") is not None


async def test_the_last_samples_of_a_vm_that_is_gone_are_written_and_forgotten(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    now = 1000.0
    async with rest_world(tmp_path) as world:
        await world.add(vm("vm-1"), vm("vm-2"))
        board = UsageBoard(lambda: now)
        keeper = UsageKeeper(world.database, board)
        for number in range(20):
            now = 1000.0 + 5.0 * number
            for vm_id in ("vm-1", "vm-2", "vm-nobody"):
                board.record_sample(vm_id, sample(0.5))
            await keeper.reconcile_once()
        async with world.database.write() as session:
            (await session.get_one(VmRow, "vm-1")).gone_at = now
        last = now
        while now < last + 600.0:
            now += 5.0
            board.record_sample("vm-2", sample(0.5))
            await keeper.reconcile_once()
        assert [set(known) for known in (board._open, board._written_at)] == [{"vm-2"}, {"vm-2"}]
        assert board._pending.keys() <= {"vm-2"}
        stored = await UsageList(world.database, None).read_usage("vm-1")
        assert stored["at_unix_s"][-1] == last - 2.5, "the last point is stored: the mean of two samples"
