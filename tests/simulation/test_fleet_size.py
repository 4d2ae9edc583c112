"""The fleet's size with a real store and controllers: requests that survive the manager, wants of jobs, refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleet_world import Disturbances, fleet_world
from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, VmRange
from varuna_manager.domain.observed import Rules
from varuna_manager.providers.base import CreatedVms
from varuna_manager.providers.static import StaticHost, StaticProvider


@pytest.mark.parametrize("point", range(8))
async def test_a_manager_that_dies_while_asking_for_vms_leaks_none_and_makes_none_twice(
    tmp_path: Path, point: int
) -> None:
    async with fleet_world(tmp_path, seed=point, disturbances=Disturbances(manager_away_s=(0.1, 2.0))) as world:
        await world.manager.fleet.set_target(3)
        world.manager.dies_in = point
        await world.run(60)
        assert world.deaths == 1
        assert world.market.made == 3
        assert len(world.invariants.vm_states()) == 3
        world.nothing_leaked()


async def test_a_fleet_grows_with_its_jobs_and_shrinks_after_them(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await world.manager.fleet.follow_jobs(VmRange(min_vms=1, max_vms=6))
        await world.run(60)
        assert len(world.invariants.vm_states()) == 1
        await world.submit("small", steps=3, resources={"max_gpus": 3})
        await world.run(60)
        assert len(world.invariants.vm_states()) == 3
        await world.run_until_over(10_000)
        await world.run(700)
        assert len(world.invariants.vm_states()) == 1
        world.nothing_leaked()
        log = world.invariants.log()
        assert "asking for 2 VMs: 3 VMs are wanted (1 job can use 3 GPUs, within 1 to 6 VMs) and 1 are there" in log
        assert "giving up" in log


async def test_a_provider_that_throttles_is_not_asked_before_it_wants(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        asked: list[float] = []
        make = world.market.create

        async def throttle(count: int, request: str) -> CreatedVms:
            asked.append(world.time.now)
            if len(asked) == 1:
                refusal = Refusal(kind=RefusalKind.THROTTLED, reason="429", retry_after_s=200.0)
                return CreatedVms(vms=(await make(1, request)).vms, refusal=refusal)
            return await make(count, request)

        world.market.create = throttle  # type: ignore[method-assign]
        await world.manager.fleet.set_target(3)
        await world.run(300)
        assert len(asked) == 2
        assert asked[1] - asked[0] >= 200
        assert world.market.made == 3


async def test_a_provider_that_does_not_answer_loses_no_vm(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await world.manager.fleet.set_target(2)
        await world.run(60)
        there = world.invariants.vm_states()
        assert set(there.values()) == {"ready"}
        answer = world.market.list

        async def away() -> list[object]:
            raise ConnectionError("no route")

        world.market.list = away  # type: ignore[assignment,method-assign]
        await world.run(120)
        assert world.invariants.vm_states() == there
        world.market.list = answer  # type: ignore[method-assign]
        await world.run(60)
        assert world.invariants.vm_states() == there
        log = world.invariants.log()
        assert log.count("the provider does not answer (ConnectionError: no route): its VMs are left alone") == 1
        assert log.count("the provider answers again") == 1
        world.expected_errors.add("the provider does not answer")


async def test_listed_hosts_are_missing_until_their_agents_come_and_others_are_refused(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        hosts = (StaticHost(name="a"), StaticHost(name="b", gpus=2))
        await world.change_provider(StaticProvider(hosts, world.time.now))
        await world.run(300)
        assert world.invariants.vm_states() == {"a": "requested", "b": "requested"}
        missing = "VM a is missing: start its agent there (varuna agent --vm-id a ..)"
        assert missing in world.invariants.log()
        agent, stranger = world.new_vm("b", 2), world.new_vm("c", 1)
        await world.run(60)
        assert world.invariants.vm_states() == {"a": "requested", "b": "ready"}
        assert not stranger.alive, "its agent was refused, and has ended"
        agent.end()
        await world.run(60)
        assert world.invariants.vm_states()["b"] == "lost"
        world.new_vm("b", 2)
        await world.run(60)
        assert world.invariants.vm_states()["b"] == "ready"


async def test_a_silent_vm_is_gone_because_it_was_given_back(tmp_path: Path) -> None:
    """The provider did not take it: it says nothing about the reason."""
    async with fleet_world(tmp_path, seed=1) as world:
        await world.manager.fleet.set_target(3)
        await world.run(60)
        silent = world.market.vms["vm-1"]
        silent.reachable = False
        await world.run(120)
        assert not silent.alive
        reason = r"VM vm-1 is gone: it was given back: it has been silent for (\d+) s"
        (silent_s,) = re.findall(reason, world.invariants.log())
        assert int(silent_s) >= Rules.lease_s


async def test_a_vm_whose_agent_never_connects_is_gone_because_it_was_given_back(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        make = world.market.create

        async def make_cut_off(count: int, request: str) -> CreatedVms:
            created = await make(count, request)
            world.market.vms["vm-1"].reachable = False
            return created

        world.market.create = make_cut_off  # type: ignore[method-assign]
        await world.manager.fleet.set_target(1)
        await world.run(150)
        gone = "VM vm-1 is gone: it was given back: its agent has not connected within 120 s"
        assert gone in world.invariants.log()


async def test_a_vm_that_its_provider_takes_is_not_said_to_be_given_back(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await world.manager.fleet.set_target(3)
        await world.run(60)
        world.market.vms["vm-1"].end()
        await world.run(120)
        assert "VM vm-1 is gone: the provider no longer lists it (there was no notice)" in world.invariants.log()
        assert "given back" not in world.invariants.log()
