"""The real manager and the real agents' states over simulated VMs, workers, network, market and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from disturbed_fleet import QUICK, books_are_right, disturbed, whole_trace
from fleet_world import fleet_world

pytestmark = pytest.mark.slow


async def test_a_job_trains_to_its_end(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1, rules=QUICK) as world:
        await world.manager.fleet.set_target(4)
        job = await world.submit("one", steps=20)
        await world.run_until_over(100_000)
        world.invariants.at_rest()
        books_are_right(world, job)
        assert world.training.jobs[job].redone == 0


async def test_disturbed_jobs_come_to_the_same_end_and_the_same_seed_gives_the_same_story(tmp_path: Path) -> None:
    stories = []
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        stories.append(await disturbed(tmp_path / name, seed=2))
    assert stories[0] == stories[1]


async def test_half_of_a_recorded_day_of_a_spot_market(tmp_path: Path) -> None:
    """The whole of it: make soak-fleets SOAK="--trace --seeds 1"."""
    print(await whole_trace(tmp_path, 7, share=0.5))


async def test_two_jobs_wait_while_there_is_no_gpu_at_all(tmp_path: Path) -> None:
    """The planner is asked for their shares of no GPUs, a question without any VM's memory."""
    async with fleet_world(tmp_path, seed=3, rules=QUICK) as world:
        await world.manager.fleet.set_target(2)
        jobs = [await world.submit(name, steps=30) for name in ("one", "two")]
        await world.run(200)
        assert {world.training.jobs[job].finished for job in jobs} == {False}
        await world.market.set_capacity(0)
        for vm_id in list(world.market.vms):
            await world.market.preempt_vm(vm_id, 0.0)
        await world.run(300)
        assert world.invariants.vm_states() == {}
        assert not any(state in ("succeeded", "failed") for state in world.invariants.job_states().values())
        await world.market.set_capacity(None)
        await world.run_until_over(100_000)
        for job in jobs:
            books_are_right(world, job)


async def test_two_jobs_start_on_one_vm_one_after_the_other(tmp_path: Path) -> None:
    """Both would have the VM's one rendezvous port, in the same look."""
    async with fleet_world(tmp_path, seed=4, rules=QUICK, gpus=4) as world:
        await world.manager.fleet.set_target(1)
        jobs = [await world.submit(name, steps=3, resources={"max_gpus": 2}) for name in ("one", "two")]
        await world.run_until_over(100_000)
        for job in jobs:
            books_are_right(world, job)
        ports = world.invariants.rendezvous_ports()
        assert len(ports) == len(set(ports)) == 4, ports


@pytest.mark.parametrize("lost", ["launch", "launch and stop"])
async def test_a_job_is_cancelled_whose_launch_never_arrived(tmp_path: Path, lost: str) -> None:
    async with fleet_world(tmp_path, seed=5, rules=QUICK) as world:
        await world.manager.fleet.set_target(2)
        job = await world.submit("one", steps=5)
        while not world.invariants.rendezvous_ports():
            await world.run(0.0005)  # less than a message to a VM takes
        for vm in world.market.vms.values():
            vm.break_stream()  # what is under way to it is lost
        if lost == "launch":
            await world.ask(lambda manager: manager.jobs.cancel_job(job))
        assert not world.training.groups, "no launch has arrived"
        if lost == "launch and stop":
            await world.ask(lambda manager: manager.jobs.cancel_job(job))
            await world.run(1.0)
            for vm in world.market.vms.values():
                vm.break_stream()
        await world.run_until_over(100)
        assert world.invariants.job_states() == {job: "cancelled"}
        world.invariants.at_rest()
