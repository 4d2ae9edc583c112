"""Plays a fleet in which everything can go wrong, and a recorded day of a spot market, and checks the outcome."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fleet_world import Disturbances, FleetWorld, fleet_world
from repository import DATA
from simulated_manager import Pace
from simulated_training import Carriage
from varuna_manager.domain.observed import Rules
from varuna_manager.providers.replay import ReplaySettings
from varuna_planner.liveput.spot_trace import SpotTrace, parse_trace

TRACE = DATA / "aws-p3-spot.csv"

QUICK = Rules(heartbeat_interval_s=3.0, suspect_after_s=10.0, lost_after_s=20.0)
COARSE = Rules(
    heartbeat_interval_s=300.0, suspect_after_s=1200.0, lost_after_s=2400.0, lease_s=3600.0, restart_grace_s=2400.0
)
"""For hours: what is learned from silence takes longer, all else (broken streams, the provider's list) does not."""

BUSY = Pace(look_after_s=8.0, store_after_s=3.0, quiet_s=(60.0, 120.0))
NOTICES_S = [0.0, 30.0, 120.0]
"""None, Azure's and AWS's."""


def books_are_right(world: FleetWorld, job_id: str) -> None:
    """The job has done all of its steps, and every one is in the manager's books."""
    job = world.training.jobs[job_id]
    assert job.done_step == job.steps
    done_steps_are_in_books(world, job_id)


def done_steps_are_in_books(world: FleetWorld, job_id: str) -> None:
    """Every step that was done is in the manager's books, and no other.

    A step may be missing if all agents that knew of it ended before any could tell the manager.
    """
    agents, steps = world.training.find_agents(job_id), set(world.invariants.steps_of(job_id))
    assert steps <= set(agents) == set(range(1, world.training.jobs[job_id].done_step + 1))
    missing = {step for step, known_by in agents.items() if known_by} - steps
    assert not missing, f"steps {sorted(missing)} of {job_id} are not in the manager's books"


def market(chance: Random, *, minutes: float, most: int) -> SpotTrace:
    """A wild market: about one burst a minute, and four VMs at the end."""
    lines = [f"0,add,n{number}" for number in range(most // 2)]
    there, number, at_ms = set(range(most // 2)), most, 0.0
    while at_ms < minutes * 60e3:
        at_ms += chance.expovariate(1 / 60e3)
        if there and chance.random() < 0.5:
            for node in chance.sample(sorted(there), min(len(there), chance.randint(1, 3))):
                there.remove(node)
                lines.append(f"{at_ms:.0f},remove,n{node}")
        elif len(there) < most:
            there.add(number)
            lines.append(f"{at_ms:.0f},add,n{number}")
            number += 1
    lines += [f"{at_ms + 1000:.0f},add,n{number + more}" for more in range(4 - len(there))]
    return parse_trace("\n".join(lines))


async def disturbed(folder: Path, seed: int) -> str:
    """Some jobs in a wild market, with a manager that dies, agents that die, a bad network and faulty workers."""
    chance = Random(seed)
    disturbances = Disturbances(
        manager_death_s=200, stream_break_s=100, partition_s=200, agent_death_s=300, worker_fault_rate=0.15
    )
    gpus = chance.choice([1, 1, 2])
    async with fleet_world(folder, seed, rules=QUICK, disturbances=disturbances, gpus=gpus) as world:
        trace = market(chance, minutes=10, most=6)
        await world.replay(trace, ReplaySettings(notice_s=chance.choice(NOTICES_S)))
        await world.manager.fleet.set_target(8)
        jobs = []
        for number in range(2):
            jobs.append(await world.submit(f"job-{number}", steps=chance.randint(10, 30), save_every=5))
            await world.run(0.5)  # their order is that of their times, and of their random ids only within one
        world.disturb()
        await world.run(600)
        world.end_disturbances()
        await world.run_until_over(50_000)
        await world.run(100)
        world.invariants.at_rest()
        assert set(world.invariants.job_states().values()) == {"succeeded"}
        for job in jobs:
            books_are_right(world, job)
        world.nothing_leaked()
        return world.story()


async def reshaped(folder: Path, seed: int) -> str:
    """One job in place, and what can go wrong with it: in any phase processes and VMs are lost, freeze or come."""
    chance = Random(seed)
    disturbances = Disturbances(
        manager_death_s=chance.choice([0, 100]),
        manager_away_s=(0.1, 20.0),
        stream_break_s=60,
        partition_s=chance.choice([0, 150]),
        agent_death_s=chance.choice([0, 200]),
        process_death_s=chance.choice([60, 150]),
        process_freeze_s=chance.choice([0, 300]),
    )
    gpus = chance.choice([1, 1, 2])
    async with fleet_world(folder, seed, rules=QUICK, disturbances=disturbances, gpus=gpus) as world:
        await world.replay(market(chance, minutes=15, most=6), ReplaySettings(notice_s=chance.choice(NOTICES_S)))
        await world.manager.fleet.set_target(8)
        layers, carriage = chance.choice([6, 12, 12, 24]), chance.choice([*Carriage, Carriage.IN_PLACE])
        job = await world.submit(
            "one", steps=30, global_batch=chance.choice([512, 1024]), save_every=5, layers=layers, carriage=carriage
        )
        world.disturb()
        await world.run(900)
        world.end_disturbances()
        await world.run_until_over(50_000)
        await world.run(200)
        world.invariants.at_rest()
        done_steps_are_in_books(world, job)
        if world.invariants.job_states()[job] != "succeeded":
            assert "failed: 5 generations in a row ended " in world.invariants.log(), "the job failed without a reason"
        world.nothing_leaked()
        return world.story()


async def whole_trace(folder: Path, seed: int, *, share: float = 1.0) -> str:
    """The recorded trace, or the first part of it, over one job that takes all VMs and one that takes few."""
    trace = parse_trace(TRACE.read_text(), name=TRACE.name)
    disturbances = Disturbances(
        pace=BUSY,
        manager_death_s=3600,
        manager_away_s=(1.0, 300.0),
        stream_break_s=1800,
        worker_fault_rate=0.02,
    )
    async with fleet_world(folder, seed, rules=COARSE, disturbances=disturbances) as world:
        await world.replay(trace, ReplaySettings())
        await world.manager.fleet.set_target(32)
        large = await world.submit("large", steps=round(400 * share), global_batch=8192, save_every=1)
        small = await world.submit("small", steps=20, save_every=10, resources={"max_gpus": 2})
        world.disturb()
        await world.run(share * (trace.ends_s - trace.starts_s))
        world.end_disturbances()
        if share == 1.0:
            await world.run_until_over(200_000)
            world.invariants.at_rest()
            world.nothing_leaked()
            books_are_right(world, large)
        books_are_right(world, small)
        return world.story()
