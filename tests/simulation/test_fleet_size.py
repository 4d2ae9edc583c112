"""The fleet's size with a real store and controllers: requests that survive the manager, wants of jobs, refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fleet_world import Disturbances, FleetWorld, fleet_world
from simulated_training import KILLED
from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, VmRange
from varuna_manager.domain.observed import Rules
from varuna_manager.providers.base import CreatedVms, ProviderNotice
from varuna_manager.providers.static import StaticHost, StaticProvider
from varuna_proto.v1 import agent_pb2 as pb


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


# ---------------------------------------------------------------- idle VMs of a fleet that follows the jobs


async def begin_on_four_of_eight(world: FleetWorld, **job: Any) -> None:
    """A job without `max_gpus` trains on 4 VMs, because the market has no more yet, of the 8 that it may have."""
    await world.market.set_capacity(4)
    await world.manager.fleet.follow_jobs(VmRange(min_vms=0, max_vms=8))
    await world.submit("one", steps=1_000_000, **job)
    await world.run_until(lambda: world.training.steps_done > 0, 10_000)
    assert list_busy(world) == ["vm-1", "vm-2", "vm-3", "vm-4"]


def list_busy(world: FleetWorld) -> list[str]:
    return sorted(vm_id for vm_id, vm in world.market.vms.items() if vm.alive and vm.workers)


def end_workers(world: FleetWorld, vm_id: str) -> None:
    for worker in list(world.market.vms[vm_id].workers.values()):
        world.training.end(worker, KILLED)


async def test_vms_that_set_up_for_a_job_are_not_given_back(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await begin_on_four_of_eight(world, setup="true", setup_s=400.0)
        await world.market.set_capacity(None)
        await world.run(900)
        assert len(list_busy(world)) == 8
        assert "giving up" not in world.invariants.log()


async def test_vms_that_wait_for_the_end_of_a_long_first_step_are_not_given_back(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await world.market.set_capacity(4)
        await world.manager.fleet.follow_jobs(VmRange(min_vms=0, max_vms=8))
        await world.submit("one", steps=1_000_000, global_batch=32_768)
        await world.run_until(lambda: len(list_busy(world)) == 4, 10_000)
        await world.market.set_capacity(None)
        await world.run_until(lambda: len(list_busy(world)) == 8, 3000)
        (before, *_) = (group for group in world.training.groups.values() if group.began and group.world_size == 4)
        assert before.step_s > 400
        assert len(list_busy(world)) == 8
        assert "giving up" not in world.invariants.log()


async def test_a_fleet_gives_back_the_vms_that_a_training_job_leaves_idle(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await world.manager.fleet.follow_jobs(VmRange(min_vms=0, max_vms=8))
        await world.submit("one", steps=1_000_000, global_batch=4, layers=2)
        await world.run(1500)
        log = world.invariants.log()
        assert len(world.invariants.vm_states()) == len(list_busy(world)) < 8
        assert "1 job left further ones idle" in log


async def test_a_vm_that_is_cordoned_is_no_sign_that_fewer_are_enough(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await begin_on_four_of_eight(world)
        await world.manager.drains.cordon_vm("vm-4")
        end_workers(world, "vm-4")
        await world.run(700)
        assert "vm-4" in world.invariants.vm_states()
        assert list_busy(world) == ["vm-1", "vm-2", "vm-3"]
        await world.market.set_capacity(None)
        await world.run(120)
        assert len(world.invariants.vm_states()) == 9, "8 VMs, beside the cordoned one"
        assert "giving up" not in world.invariants.log()


async def test_a_vm_in_quarantine_is_no_sign_that_fewer_are_enough(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await begin_on_four_of_eight(world)
        await world.manager.quarantine_vm("vm-4", 600.0)
        end_workers(world, "vm-4")
        await world.run(500)
        assert list_busy(world) == ["vm-1", "vm-2", "vm-3"]
        assert len(world.invariants.vm_states()) == 4
        assert "giving up" not in world.invariants.log()
        await world.run(300)
        assert len(list_busy(world)) == 4


async def test_each_loss_of_a_vm_is_followed_by_an_event_that_another_is_asked_for(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await world.manager.fleet.set_target(2)
        await world.run(60)
        for vm_id in ("vm-1", "vm-3"):
            world.market.vms[vm_id].end()
            await world.run(60)
        asked = "asking for 1 VM: 2 VMs are wanted and 1 are there"
        assert world.invariants.log().count(asked) == 2


async def test_a_vm_that_is_taken_in_during_a_look_is_not_gone_because_the_look_began_before_it(
    tmp_path: Path,
) -> None:
    async with fleet_world(tmp_path, seed=1) as world:
        await world.market.set_capacity(1)
        await world.manager.fleet.set_target(2)
        await world.run(60)
        ask = world.market.list_notices

        async def take_in_another() -> Sequence[ProviderNotice]:
            """The list of this look is there; a VM comes after it, and the list for its Hello has it."""
            world.market.list_notices = ask  # type: ignore[method-assign]
            await world.market.set_capacity(2)
            created = await world.market.create(1, "another manager's")
            hello = pb.Hello(vm_id=created.vms[0].id, incarnation="first", gpus=1, host="n1")
            assert await world.manager.fleet.admit_agent(hello) is None
            return await ask()

        world.market.list_notices = take_in_another  # type: ignore[method-assign]
        world.manager.bell.notify_listeners()
        await world.run(60)
        assert world.invariants.vm_states() == {"vm-1": "ready", "vm-2": "ready"}
        assert "VM vm-2 is gone" not in world.invariants.log()
