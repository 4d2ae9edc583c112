"""Slow VMs in the store: a new manager goes on with what the one before has found."""

from __future__ import annotations

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


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        yield world


@pytest.mark.parametrize(("factor", "is_slow"), [(1.0, False), (1.12, True)], ids=["well", "not quite"])
async def test_a_vm_that_another_manager_has_marked_is_watched_on(
    world: RestWorld, factor: float, is_slow: bool
) -> None:
    plan = Plan(p=1, d=2, micro_batch=1, global_batch=8, stage_starts=(0,), recompute=(False,))
    job = JobRow(id="j", name="gpt", active_name="gpt", spec=SPEC, state="running", history=[], created_at=1.0)
    job.profile_json = profile_json(4)
    running = generation("j", 1, 2.0, state="running", plan=plan.to_document())
    vms = [vm("vm-0"), vm("vm-1", slow_ratio=1.3, slow_reason="it was slow")]
    await world.add(job, *vms)
    await world.add(running)
    await world.add(*(worker("j", 1, rank, name, "running") for rank, name in enumerate(VMS)))
    times = ComputeTimes()
    for step in range(1, STEPS_NEEDED + 1):
        for rank, name in enumerate(VMS):
            took_us = int(1000 * (factor if rank else 1.0))
            times.record_workers(name, [Health(job_id="j", generation=1, rank=rank, step=step, forward_us=took_us)])
    controller = ComputeController(world.database, times, PlanningService(), world.events, Bell(), Rules())
    await controller.reconcile_once()
    async with world.database.read() as session:
        assert ((await session.get_one(VmRow, "vm-1")).slow_ratio is not None) is is_slow
    well = (await world.ask("GET", "/api/v1/events?kind=vm_well")).json()
    assert len(well) == (not is_slow)
