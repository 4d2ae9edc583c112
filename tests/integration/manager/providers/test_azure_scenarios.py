"""What happens to a fleet on Azure in its life: growth, evictions, no capacity, a dying manager, throttling, no answer.


Each ends with the same VMs in the store and at Azure, and within the fleet's limits at every moment.
"""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import pytest

from cloud_world import A100, V100, cloud_world, held_answer
from varuna_manager.domain.fleet_decision import FleetLimits, VmRange
from virtual_loop import in_virtual_time

pytestmark = pytest.mark.slow


EVERYWHERE = ((A100, "1"), (A100, "2"), (V100, "1"))


@in_virtual_time
async def test_a_fleet_grows_to_32_vms_and_goes_again(tmp_path: Path) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_vms=32)) as world:
        world.arm.create_s = 40.0
        await world.fleet.set_target(40)
        await world.run_until_settled(32)
        assert "the limit is 32 VMs" in await world.log()
        await world.fleet.set_target(0)
        await world.run_until_settled(0)


@in_virtual_time
async def test_six_vms_that_are_evicted_at_once_are_replaced(tmp_path: Path) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_vms=10)) as world:
        await world.fleet.set_target(10)
        await world.run_until_settled(10)
        evicted = sorted(world.arm.vms)[2:8]
        world.arm.evict(*evicted)
        await world.run(15.0)
        assert not {*evicted} & {*await world.states()}
        await world.run_until_settled(10)
        assert not {*evicted} & world.arm.vms.keys()


@in_virtual_time
async def test_vms_that_azure_takes_its_time_to_evict_are_paid_for_until_then(tmp_path: Path) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_vms=8)) as world:
        await world.fleet.set_target(8)
        await world.run_until_settled(8)
        leaving = sorted(world.arm.vms)[:3]
        for name in leaving:
            world.arm.vms[name].state = "Deleting"
        await world.run(60.0)
        assert not {*leaving} & {*await world.states()}, "nothing runs there now"
        assert len(world.arm.vms) == 8, "and there is no room for others yet"
        world.arm.evict(*leaving)
        await world.run_until_settled(8)


@in_virtual_time
async def test_an_hour_without_capacity_is_waited_out_politely(tmp_path: Path) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_vms=12)) as world:
        world.arm.refuses_at_once = True
        world.arm.capacity = dict.fromkeys(EVERYWHERE, 0)
        await world.fleet.set_target(12)
        await world.run(3600.0, step_s=60.0)
        assert await world.ready() == []
        # Twelve before the shortage was known, then one VM each half minute for each of the three.
        assert len(world.arm.vm_writes()) <= 12 * 3 + 3 * 130
        log = await world.log()
        assert log.count("the provider refused (capacity)") < 10
        world.arm.capacity = {(A100, "1"): 0, (A100, "2"): 5}
        await world.run_until_settled(12)
        places = [vm.place for vm in world.arm.vms.values()]
        assert places.count((A100, "2")) == 5, "the preferred size as far as it goes"
        assert places.count((V100, "1")) == 7


@pytest.mark.parametrize("dies", ["before", "after"])
@in_virtual_time
async def test_a_manager_that_dies_around_a_request_leaks_no_vm_and_makes_none_twice(tmp_path: Path, dies: str) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_vms=6)) as world:
        world.provider.dies = dies
        await world.fleet.set_target(6)
        await world.run_until_settled(6)
        assert world.deaths == 1
        assert len({*world.arm.vm_writes()}) == 6
        await world.fleet.set_target(0)
        await world.run_until_settled(0)


@in_virtual_time
async def test_a_fleet_that_is_wanted_smaller_while_the_manager_is_dead_does_not_grow(tmp_path: Path) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_vms=6)) as world:
        world.provider.dies = "after"
        await world.fleet.set_target(6)
        await world.run(15.0)
        assert world.deaths == 1
        await world.fleet.set_target(2)
        await world.run_until_settled(2)
        assert len({*world.arm.vm_writes()}) == 6


@in_virtual_time
async def test_azure_is_not_asked_before_it_wants(tmp_path: Path) -> None:
    async with cloud_world(tmp_path) as world:
        world.arm.throttle = [300.0, 300.0]
        await world.fleet.set_target(2)
        await world.run(280.0)
        assert len(world.arm.vm_writes()) == 2
        assert not world.arm.vms
        await world.run_until_settled(2)


@pytest.mark.parametrize("call", ["list", "get_offer", "delete"])
@in_virtual_time
async def test_a_notice_counts_while_azure_does_not_answer(tmp_path: Path, call: str) -> None:
    async with cloud_world(tmp_path) as world:
        await world.fleet.set_target(3)
        await world.run_until_settled(3)
        async with held_answer(world.provider, call):
            await world.fleet.set_target(2)
            await world.run(30.0)
            leaving = (await world.ready())[-1]
            await world.give_notice(leaving)
            await world.run(15.0)
            assert (await world.states())[leaving] == "draining"
        world.arm.evict(leaving)
        await world.run_until_settled(2)


@in_virtual_time
async def test_a_silent_vm_is_given_up_while_azure_does_not_answer_whose_answer_is_used_later(tmp_path: Path) -> None:
    async with cloud_world(tmp_path) as world:
        await world.fleet.set_target(3)
        await world.run_until_settled(3)
        silent = min(world.arm.vms)
        async with held_answer(world.provider, "list"):
            await world.run(15.0)
            world.arm.evict(silent)
            await world.run(120.0)
            assert (await world.states())[silent] == "lost"
            assert len(world.arm.vms) == 2
        await world.run(15.0)
        assert silent not in await world.states()
        await world.run_until_settled(3)


@in_virtual_time
async def test_slow_deletes_hold_back_what_takes_their_places(tmp_path: Path) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_vms=8)) as world:
        await world.fleet.set_target(8)
        await world.run_until_settled(8)
        world.arm.delete_s = 300.0
        first = {*world.arm.vms}
        await world.fleet.set_target(2)
        await world.run(60.0)
        await world.fleet.set_target(8)
        await world.run(120.0)
        assert {*world.arm.vms} == first
        await world.run_until_settled(8)
        assert len({*world.arm.vms} & first) == 2


@in_virtual_time
async def test_a_dearer_size_is_taken_only_as_far_as_the_cost_allows(tmp_path: Path) -> None:
    async with cloud_world(tmp_path, FleetLimits(max_cost_per_hour=4.0)) as world:
        world.arm.market = {A100.lower(): ("0.5", "0-5"), V100.lower(): ("0.9", "5-10")}
        world.arm.prices = {A100: 0.5, V100: 0.9}
        world.arm.refuses_at_once = True
        world.arm.capacity = {(A100, "1"): 1, (A100, "2"): 2}
        await world.fleet.set_target(10)
        await world.run_until_settled(3 + 2)  # 3 * 0.5 + 2 * 0.9 = 3.3: one more might be 4.2
        await world.run(300.0, step_s=30.0)
        assert len(await world.ready()) == 5
        assert world.arm.most_cost == pytest.approx(3.3)


@in_virtual_time
async def test_a_price_that_rises_leaves_the_past_as_it_was(tmp_path: Path) -> None:
    async with cloud_world(tmp_path) as world:
        costs = [0.0]
        for price in ("0.5", "1.0", "0.5"):
            world.arm.market = {A100.lower(): (price, "0-5"), V100.lower(): (price, "0-5")}
            await world.fleet.set_target(1)
            await world.run(3 * 3600.0, step_s=60.0)
            costs.append(await world.cost())
        paid = [later - before for before, later in itertools.pairwise(costs)]
        assert paid == pytest.approx([1.5, 3.0, 1.5], rel=0.1), "prices are asked for every ten minutes"


@in_virtual_time
async def test_a_vm_that_the_store_gave_up_is_reaped(tmp_path: Path) -> None:
    async with cloud_world(tmp_path) as world:
        await world.fleet.set_target(2)
        await world.run_until_settled(2)
        back = sorted(world.arm.vms)[0]
        vm = world.arm.vms[back]
        world.arm.evict(back)
        await world.run_until_settled(2)
        world.arm.vms[back] = vm  # as if it had been out of Azure's sight
        await world.run_until_settled(2)
        assert back not in world.arm.vms


@in_virtual_time
async def test_vms_that_a_restored_store_lacks_are_taken_in_and_stay(tmp_path: Path) -> None:
    async with cloud_world(tmp_path) as world:
        await world.fleet.set_target(3)
        await world.run_until_settled(3)
        before = {*world.arm.vms}
        await world.run(7200.0, step_s=600.0)
        await world.stop()
        with sqlite3.connect(tmp_path / "manager.db") as store:
            store.execute("DELETE FROM vms")
        await world.start()
        await world.run(15.0)
        assert {*world.arm.vms} == {*await world.states()} == before


@in_virtual_time
async def test_a_clock_that_is_set_forward_makes_no_vm_idle_for_long(tmp_path: Path) -> None:
    async with cloud_world(tmp_path) as world:
        await world.fleet.set_target(3)
        await world.run_until_settled(3)
        await world.fleet.follow_jobs(VmRange(min_vms=1, max_vms=3))
        await world.run(60.0)
        world.clock_set_by_s += 3600.0
        await world.run(60.0)
        assert len(await world.ready()) == 3
        await world.run_until_settled(1)
