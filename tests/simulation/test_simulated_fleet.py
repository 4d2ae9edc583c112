"""The real manager and the real agents' states over simulated VMs, workers, network, market and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from disturbed_fleet import QUICK, books_are_right, disturbed, whole_trace
from fleet_world import fleet_world


async def test_a_job_trains_to_its_end(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1, rules=QUICK) as world:
        await world.manager.fleet.set_target(4)
        job = await world.submit("one", steps=20)
        await world.run_until_over(100_000)
        world.invariants.at_rest()
        books_are_right(world, job)
        assert world.training.jobs[job].redone == 0


@pytest.mark.parametrize("seed", [1, 2])
async def test_disturbed_jobs_come_to_the_same_end(tmp_path: Path, seed: int) -> None:
    assert "commits checked" in await disturbed(tmp_path, seed)


async def test_the_beginning_of_a_recorded_spot_market(tmp_path: Path) -> None:
    """The whole of it takes minutes: make soak-fleets SOAK="--trace --seeds 1"."""
    print(await whole_trace(tmp_path, 7, share=0.03))
