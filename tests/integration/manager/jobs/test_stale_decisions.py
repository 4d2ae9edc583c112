"""What changes while a controller decides, or between two generations: no decision is carried out on what is gone."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm.exc import StaleDataError

from controller_world import controller_over, registry_of
from migrated_stores import migrated
from rest_world import SPEC, RestWorld, generation, rest_world, vm, worker
from snapshots import PROFILE
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.controllers.job_actions import JobActions
from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.actions import StartGeneration
from varuna_manager.domain.commands import LaunchKey
from varuna_manager.domain.observed import Proposal
from varuna_manager.domain.states import GenerationKind
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.planning import PlanQuestion
from varuna_manager.world.bell import Bell
from varuna_proto.plan import Device, Plan

VMS = ("vm-0", "vm-1")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        yield world


def queued_job() -> JobRow:
    return JobRow(id="j", name="gpt", active_name="gpt", spec=SPEC, state="queued", history=[], created_at=1.0)


@pytest.mark.parametrize("state", ["lost", "gone", "draining"])
@pytest.mark.parametrize("lost", VMS)
async def test_no_worker_is_assigned_to_a_vm_that_was_lost_or_drained_after_the_decision(
    world: RestWorld, state: str, lost: str
) -> None:
    await world.add(queued_job(), *(vm(vm_id, state=state if vm_id == lost else "ready") for vm_id in VMS))
    actions = JobActions(registry_of(VMS), world.events, StackService(world.database, AgentSessions(), Bell()))
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


@pytest.mark.parametrize("change", ["drain", "cordon"])
async def test_no_generation_starts_on_a_vm_that_a_user_takes_out_of_use_while_the_planner_thinks(
    world: RestWorld, change: str
) -> None:
    job = queued_job()
    job.profile_json, job.profiled_at = PROFILE, 2.0
    await world.add(job, *(vm(vm_id) for vm_id in VMS))
    async with controller_over(world, VMS) as over:
        planning = over.controller._planning
        propose_plan = planning.propose_plan

        async def propose_and_be_overtaken(question: PlanQuestion) -> Proposal:
            proposal = await propose_plan(question)
            assert (await world.ask("POST", f"/api/v1/vms/vm-1/{change}")).status_code == 200
            return proposal

        planning.propose_plan = propose_and_be_overtaken  # type: ignore[method-assign]
        while await over.controller.reconcile_once() == 0.0:
            pass
    async with world.database.read() as session:
        assert list(await session.scalars(select(WorkerRow.vm_id))) == ["vm-0"]


async def test_an_agent_that_connects_during_a_look_gets_its_commands_at_the_next(world: RestWorld) -> None:
    """What the look has loaded may say that its workers are still to be started, although its Hello has ended them."""
    await world.add(queued_job(), *(vm(vm_id) for vm_id in VMS))
    async with controller_over(world, VMS) as over:
        assert await over.controller.reconcile_once() == 0.0, "it starts the calibration"
        load_snapshot = over.loader.load_snapshot
        returned = [AgentSession(vm_id, "2", ()) for vm_id in VMS]

        async def load_and_be_overtaken() -> object:
            snapshot = await load_snapshot()
            for session in returned:
                over.sessions.add_session(session)
            return snapshot

        over.loader.load_snapshot = load_and_be_overtaken  # type: ignore[method-assign, assignment]
        await over.controller.reconcile_once()
        assert not any(session.sent_commands for session in returned)
        over.loader.load_snapshot = load_snapshot  # type: ignore[method-assign]
        await over.controller.reconcile_once()
        assert any(session.sent_commands for session in returned)


async def test_a_job_that_waits_again_though_it_has_the_profile_that_it_is_for_is_over(world: RestWorld) -> None:
    """It was cancelled and retried when the profile had just arrived."""
    job = queued_job()
    job.spec, job.profiled_at = {**SPEC, "profile_only": True}, 2.0
    await world.add(job, *(vm(vm_id) for vm_id in VMS))
    async with controller_over(world, VMS) as over:
        await over.controller.reconcile_once()
    async with world.database.read() as session:
        assert (await session.get_one(JobRow, "j")).state == "succeeded"


async def test_a_job_whose_processes_wait_for_another_shape_is_not_sent_back_to_the_queue(world: RestWorld) -> None:
    """They have saved nothing: what they hold is the newest state."""
    now = time.time()
    job = queued_job()
    job.state, job.profile_json, job.profiled_at, urgent = "running", PROFILE, 2.0, queued_job()
    urgent.id = urgent.name = urgent.active_name = "urgent"
    urgent.spec = {**SPEC, "priority": 9, "resources": {"min_gpus": 2}}
    ended = generation("j", 1, now - 5, end_cause="growth", end_reason="growth", ended_at=now - 1)
    workers = [worker("j", 1, rank, vm_id) for rank, vm_id in enumerate(VMS)]
    for one in workers:
        one.cause, one.held_step, one.stopped_at = "generation_ended", 5, now - 1
    await world.add(job, urgent, *(vm(vm_id) for vm_id in VMS))
    await world.add(ended)
    await world.add(*workers)
    async with controller_over(world, VMS) as over:
        while await over.controller.reconcile_once() == 0.0:
            pass  # until a look changes nothing, and commands are sent
        sent = [key for session in over.sessions.list_sessions() for key in session.sent_commands]
    assert {type(key) for key in sent} == {LaunchKey}
    async with world.database.read() as session:
        assert (await session.get_one(JobRow, "j")).state == "running"
        assert (await session.get_one(JobRow, "urgent")).state == "queued"
        begun = (await session.scalars(select(GenerationRow).where(GenerationRow.number == 2))).one()
        assert (begun.state, begun.stop_mode) == ("launching", None), "it takes the state before it is stopped"
