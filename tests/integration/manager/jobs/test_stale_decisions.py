"""What changes while a controller decides: its decision is not carried out on what is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm.exc import StaleDataError

from rest_world import SPEC, RestWorld, migrated, rest_world, vm
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.controllers.job_actions import JobActions
from varuna_manager.controllers.job_controller import JobController, JobControllerServices, LaunchDefaults
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.db.models import JobRow, VmRow, WorkerRow
from varuna_manager.domain.actions import StartGeneration
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.states import GenerationKind
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.planning.rates import RateService
from varuna_manager.world.bell import Bell
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from varuna_proto.plan import Device, Plan

VMS = ("vm-0", "vm-1")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    await migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        yield world


def registry_of_vms() -> VmRegistry:
    registry = VmRegistry()
    for vm_id in VMS:
        registry.add_hello(vm_id, rendezvous_port=20_000, workers=())
    return registry


def queued_job() -> JobRow:
    return JobRow(id="j", name="gpt", active_name="gpt", spec=SPEC, state="queued", history=[], created_at=1.0)


@pytest.mark.parametrize("state", ["lost", "gone"])
@pytest.mark.parametrize("lost", VMS)
async def test_no_worker_is_assigned_to_a_vm_that_was_lost_after_the_decision(
    world: RestWorld, state: str, lost: str
) -> None:
    await world.add(queued_job(), *(vm(vm_id, state=state if vm_id == lost else "ready") for vm_id in VMS))
    actions = JobActions(registry_of_vms(), world.events, StackService(world.database, AgentSessions(), Bell()))
    start = StartGeneration(
        number=1,
        kind=GenerationKind.TRAINING,
        placement=tuple(Device(vm_id, 0) for vm_id in VMS),
        plan=Plan(p=1, d=2, micro_batch=1, global_batch=8, predicted_minibatch_s=1.0, examples_per_s=8.0),
        candidates=(),
        reason="test",
    )
    with pytest.raises(StaleDataError, match=f"VM {lost}"):
        async with world.database.write() as session:
            await actions.apply_action(session, await session.get_one(JobRow, "j"), start)
    async with world.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(WorkerRow)) == 0
        assert (await session.get_one(VmRow, lost)).state == state


async def test_an_agent_that_connects_during_a_look_gets_its_commands_at_the_next(world: RestWorld) -> None:
    """What the look has loaded may say that its workers are still to be started, although its Hello has ended them."""
    await world.add(queued_job(), *(vm(vm_id) for vm_id in VMS))
    database, bell, sessions = world.database, Bell(), AgentSessions()
    for vm_id in VMS:
        sessions.add_session(AgentSession(vm_id, "1", ()))
    rates, rules = RateService(bell), Rules()
    loader = SnapshotLoader(database, World(database, registry_of_vms()), rules)
    services = JobControllerServices(
        sessions=sessions,
        planning=PlanningService(),
        rates=rates,
        stacks=StackService(database, sessions, bell),
        events=world.events,
    )
    defaults = LaunchDefaults(checkpoint_root="file:///checkpoints", profile_cache_url="")
    controller = JobController(database, loader, services, rules, defaults, period_s=0.5)
    try:
        assert await controller.reconcile_once() == 0.0, "it starts the calibration"
        load_snapshot = loader.load_snapshot
        returned = [AgentSession(vm_id, "2", ()) for vm_id in VMS]

        async def load_and_be_overtaken() -> object:
            snapshot = await load_snapshot()
            for session in returned:
                sessions.add_session(session)
            return snapshot

        loader.load_snapshot = load_and_be_overtaken  # type: ignore[method-assign, assignment]
        await controller.reconcile_once()
        assert not any(session.sent_commands for session in returned)
        loader.load_snapshot = load_snapshot  # type: ignore[method-assign]
        await controller.reconcile_once()
        assert any(session.sent_commands for session in returned)
    finally:
        await rates.close()
