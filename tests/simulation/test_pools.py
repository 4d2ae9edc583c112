"""A fleet of several pools: the real manager over simulated markets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fleet_world import Disturbances, FleetWorld, fleet_world
from varuna_manager.db.engine import Database
from varuna_manager.domain.pools import PoolTerms
from varuna_manager.errors import StartError
from varuna_manager.fleet.pools import check_pools
from varuna_manager.providers.base import ProviderVm
from varuna_manager.providers.pools.provider import Pool, PoolsProvider
from varuna_proto.rest_fleet import PoolDocument


async def open_pools(world: FleetWorld, *pools: PoolTerms, boot_s: tuple[float, float] = (2.0, 30.0)) -> PoolsProvider:
    """A new manager, with a market for each pool."""
    provider = PoolsProvider([Pool(terms, world.make_market(terms.name, boot_s)) for terms in pools])
    await world.change_provider(provider)
    return provider


def terms(name: str, price: float = 1.0, **more: object) -> PoolTerms:
    return PoolTerms(name=name, price_per_hour=price, zone=f"zone-{name}", **more)  # type: ignore[arg-type]


def count_vms(world: FleetWorld) -> dict[str, int]:
    """Those in the store that are not gone, by pool."""
    return dict(Counter(vm_id.rpartition("-")[0] for vm_id in world.invariants.vm_states()))


async def find_pool(world: FleetWorld, name: str) -> PoolDocument:
    found = (await world.manager.fleet.describe_fleet())["pools"]
    return next(pool for pool in found if pool["name"] == name)


async def test_vms_come_from_the_pool_with_more_for_a_dollar_and_carry_its_name(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await open_pools(world, terms("dear", 3.0), terms("cheap", 1.0))
        await world.manager.fleet.set_target(4)
        await world.run(60)
        assert count_vms(world) == {"cheap": 4}
        world.nothing_leaked()
        assert "asking for 4 VMs: 4 VMs are wanted and 0 are there: 4 of cheap (" in world.invariants.log()
        fleet = await world.manager.fleet.describe_fleet()
        assert [(pool["name"], pool["vms"]) for pool in fleet["pools"]] == [("dear", 0), ("cheap", 4)]
        assert fleet["pools_reason"] is not None
        assert fleet["pools_reason"].startswith("4 of cheap (")


async def test_a_pool_that_dries_up_is_moved_on_from_and_looked_at_again(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await open_pools(world, terms("cheap", 1.0), terms("dear", 3.0))
        cheap = world.markets["cheap"]
        await cheap.set_capacity(2)
        await world.manager.fleet.set_target(5)
        await world.run(60)
        assert count_vms(world) == {"cheap": 2, "dear": 3}
        assert "pool cheap refused (capacity): there are 2 VMs to be had" in world.invariants.log()
        await cheap.set_capacity(None)
        await world.manager.fleet.set_target(9)
        await world.run(120)
        assert count_vms(world)["cheap"] > 2
        assert (await find_pool(world, "cheap"))["refusals"] == 0
        world.nothing_leaked()


async def test_every_vm_of_a_pool_is_taken_and_the_job_goes_on_in_another(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await open_pools(world, terms("one", 1.0), terms("two", 1.5))
        await world.manager.fleet.set_target(4)
        job = await world.submit("gpt", steps=60)
        await world.run(120)
        assert count_vms(world) == {"one": 4}
        one = world.markets["one"]
        await one.set_capacity(0)
        for vm_id in list(one.vms):
            await one.preempt_vm(vm_id, 0.0)
        await world.run_until_over(100_000)
        assert world.training.jobs[job].finished
        assert count_vms(world) == {"two": 4}
        world.nothing_leaked()


async def test_the_past_of_a_pool_decides_between_two(tmp_path: Path) -> None:
    """Both cost about the same. One loses each VM soon after it has come, and the next manager still knows it."""
    async with fleet_world(tmp_path, seed=1) as world:
        provider = await open_pools(world, terms("calm", 1.01), terms("wild", 1.0), boot_s=(60.0, 100.0))
        await world.manager.fleet.set_target(4)
        await world.run(600)
        assert count_vms(world) == {"calm": 2, "wild": 2}
        for _ in range(60):
            ready = [vm_id for vm_id, state in world.invariants.vm_states().items() if state == "ready"]
            for vm_id in ready:
                if vm_id.startswith("wild"):
                    await world.markets["wild"].preempt_vm(vm_id, 0.0)
            await world.run(60)
        wild, calm = await find_pool(world, "wild"), await find_pool(world, "calm")
        assert wild["hazard_per_hour"] > 3 * calm["hazard_per_hour"]
        assert wild["gpu_hours_per_dollar"] < calm["gpu_hours_per_dollar"]
        await world.change_provider(provider)
        await world.manager.fleet.set_target(12)
        await world.run(60)
        assert count_vms(world)["calm"] >= 8


async def test_a_pool_that_does_not_answer_loses_no_vm_and_the_others_go_on(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await open_pools(world, terms("one"), terms("two"))
        await world.manager.fleet.set_target(4)
        await world.run(60)
        there = world.invariants.vm_states()
        assert count_vms(world) == {"one": 2, "two": 2}
        answer = world.markets["one"].list

        async def away() -> list[ProviderVm]:
            raise ConnectionError("no route")

        world.markets["one"].list = away  # type: ignore[method-assign]
        taken = next(iter(world.markets["two"].vms))
        await world.markets["two"].preempt_vm(taken, 0.0)
        await world.run(120)
        after = world.invariants.vm_states()
        assert taken not in after
        assert {vm_id for vm_id in there if vm_id.startswith("one")} <= after.keys()
        assert len(after) == 4
        assert "pool one does not answer (ConnectionError: no route): its VMs are left alone" in world.invariants.log()
        world.markets["one"].list = answer  # type: ignore[method-assign]
        await world.run(60)
        world.nothing_leaked()


@pytest.mark.parametrize("point", range(8))
async def test_a_manager_that_dies_while_asking_pools_leaks_none_and_makes_none_twice(
    tmp_path: Path, point: int
) -> None:
    async with fleet_world(tmp_path, seed=point, disturbances=Disturbances(manager_away_s=(0.1, 2.0))) as world:
        await open_pools(world, terms("one"), terms("two"))
        await world.manager.fleet.set_target(4)
        world.manager.dies_in = point
        await world.run(60)
        assert world.deaths == 1
        assert {name: market.made for name, market in world.markets.items()} == {"vm": 0, "one": 2, "two": 2}
        assert count_vms(world) == {"one": 2, "two": 2}
        world.nothing_leaked()


async def test_a_pool_that_the_settings_no_longer_have_is_told_in_one_line(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        provider = await open_pools(world, terms("one"), terms("two"))
        await world.manager.fleet.set_target(4)
        await world.run(60)
        database = Database(world.manager.url)
        await check_pools(database, provider)
        left = PoolsProvider([Pool(terms("one"), world.markets["one"])])
        text = (
            r"the fleet's settings have no pool 'two' any longer, but 2 VMs of it may still run \(two-1, two-2\): put "
            r"it back with max_vms: 0, and remove it when they are drained \(varuna drain\)"
        )
        with pytest.raises(StartError, match=text):
            await check_pools(database, left)
        with pytest.raises(StartError, match="no pool 'one' any longer"):
            await check_pools(database, world.market)
        await database.close()


async def test_a_limit_of_vms_holds_for_each_pool_over_restarts(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        provider = await open_pools(world, terms("one", 1.0, max_vms=2), terms("two", 5.0))
        await world.manager.fleet.set_target(3)
        await world.run(60)
        assert count_vms(world) == {"one": 2, "two": 1}
        await world.change_provider(provider)
        await world.manager.fleet.set_target(5)
        await world.run(60)
        assert count_vms(world) == {"one": 2, "two": 3}
