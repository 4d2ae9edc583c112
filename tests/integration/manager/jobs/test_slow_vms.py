"""Slow VMs in the store: a new manager goes on with what the one before has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleet_world import profile_json
from migrated_stores import migrated
from rest_world import SPEC, RestWorld, generation, rest_world, vm, worker
from varuna_manager.agents.compute_times import STEPS_NEEDED, ComputeTimes
from varuna_manager.controllers.compute_controller import ComputeController
from varuna_manager.db.models import JobRow, VmRow
from varuna_manager.domain.observed import Rules
from varuna_manager.planning.planning import PlanningService
from varuna_manager.world.bell import Bell
from varuna_manager.world.vm_registry import Health
from varuna_proto.plan import Plan

VMS = ("vm-0", "vm-1")
STEPS: Counter[tuple[str, int]] = Counter()
"""Of each rank of each job, so far."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        yield world


async def add_running_job(world: RestWorld, times: ComputeTimes, name: str, factor: float) -> None:
    """On both VMs; on the second one it takes `factor` times as long."""
    plan = Plan(p=1, d=2, micro_batch=1, global_batch=8, stage_starts=(0,), recompute=(False,))
    job = JobRow(id=name, name=name, active_name=name, spec=SPEC, state="running", history=[], created_at=1.0)
    job.profile_json = profile_json(4)
    await world.add(job)
    await world.add(generation(name, 1, 2.0, state="running", plan=plan.to_document()))
    await world.add(*(worker(name, 1, rank, vm_id, "running") for rank, vm_id in enumerate(VMS)))
    note_steps(times, {name: factor})


def note_steps(times: ComputeTimes, factors: dict[str, float]) -> None:
    """So many steps of each job as a look needs."""
    for _ in range(STEPS_NEEDED):
        for rank, vm_id in enumerate(VMS):
            healths = []
            for name, factor in factors.items():
                STEPS[name, rank] += 1
                took_us = int(1000 * (factor if rank else 1.0))
                step = STEPS[name, rank]
                healths.append(Health(job_id=name, generation=1, rank=rank, step=step, forward_us=took_us))
            times.record_workers(vm_id, healths)


def make_controller(world: RestWorld, times: ComputeTimes) -> ComputeController:
    return ComputeController(world.database, times, PlanningService(), world.events, Bell(), Rules())


async def find_vm(world: RestWorld) -> VmRow:
    async with world.database.read() as session:
        return await session.get_one(VmRow, "vm-1")


@pytest.mark.parametrize(("factor", "is_slow"), [(1.0, False), (1.12, True)], ids=["well", "not quite"])
async def test_a_vm_that_another_manager_has_marked_is_watched_on(
    world: RestWorld, factor: float, is_slow: bool
) -> None:
    times = ComputeTimes()
    await world.add(vm("vm-0"), vm("vm-1", slow_ratio=1.3, slow_reason="it was slow"))
    await add_running_job(world, times, "j", factor)
    await make_controller(world, times).reconcile_once()
    assert ((await find_vm(world)).slow_ratio is not None) is is_slow
    well = (await world.ask("GET", "/api/v1/events?kind=vm_well")).json()
    assert len(well) == (not is_slow)


async def test_another_job_on_a_slow_vm_does_not_clear_the_mark(world: RestWorld) -> None:
    times, rules = ComputeTimes(), Rules()
    await world.add(vm("vm-0"), vm("vm-1"))
    await add_running_job(world, times, "slow", 2.0)
    controller = make_controller(world, times)
    for _ in range(rules.slow_looks):
        await controller.reconcile_once()
        note_steps(times, {"slow": 2.0})
    marked = await find_vm(world)
    assert marked.slow_ratio == pytest.approx(2.0)
    await add_running_job(world, times, "well", 1.0)
    note_steps(times, {"slow": 2.0, "well": 1.0})
    await controller.reconcile_once()
    still = await find_vm(world)
    assert (still.slow_ratio, still.slow_reason) == (marked.slow_ratio, marked.slow_reason)
    assert (await world.ask("GET", "/api/v1/events?kind=vm_well")).json() == []
