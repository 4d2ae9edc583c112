"""Which copies a generation keeps is chosen when it starts, and is the same for whoever asks from then on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from controller_world import controller_over, registry_of
from fleet_world import profile_json
from migrated_stores import migrated
from rest_world import SPEC, RestWorld, rest_world, vm
from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSessions
from varuna_manager.controllers.job_actions import JobActions
from varuna_manager.controllers.messages import launch_message
from varuna_manager.db.models import CheckpointRow, GenerationRow, JobRow, VmRow
from varuna_manager.domain.actions import StartGeneration
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.keepers import CopiesFacts, SaveCost
from varuna_manager.domain.states import GenerationKind
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.jobs.checkpoints import read_saved_step
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.world.bell import Bell
from varuna_proto.plan import Device, Plan
from varuna_proto.v1 import agent_pb2 as pb

VMS = ("vm-0", "vm-1", "vm-2", "vm-3")
PLAN = Plan(p=2, d=2, micro_batch=1, global_batch=8, predicted_minibatch_s=180.0, examples_per_s=8.0)
START = StartGeneration(
    number=1,
    kind=GenerationKind.TRAINING,
    placement=tuple(Device(vm_id, 0) for vm_id in VMS),
    plan=PLAN,
    candidates=(),
    reason="test",
)
WILD = CopiesFacts(fleet=FleetPast(removals=30.0), step_s=180.0, save=SaveCost(stall_s=0.5, write_s=4.0))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        yield world


async def add_job(world: RestWorld, **values: Any) -> None:
    job = JobRow(id="j", name="gpt", active_name="gpt", spec=SPEC, state="queued", history=[], created_at=1.0, **values)
    await world.add(job, *(vm(vm_id) for vm_id in VMS))


async def start(world: RestWorld, facts: CopiesFacts, action: StartGeneration = START) -> None:
    actions = JobActions(registry_of(VMS), world.events, StackService(world.database, AgentSessions(), Bell()))
    async with world.database.write() as session:
        await actions.apply_action(session, await session.get_one(JobRow, "j"), action, facts)


async def read_launches(world: RestWorld) -> list[bool]:
    """Whether the Launch of each VM asks for marks, of a manager that has just started."""
    async with controller_over(world, VMS) as over:
        snapshot = await over.loader.load_snapshot()
    [job] = snapshot.jobs
    assert job.view.fleet.removals == 0.0, "it knows of no loss"
    messages = [
        launch_message(
            job, each, secrets={}, default_checkpoint_url="", profile_cache_url="", spans=MorphSpans()
        ).launch
        for each in snapshot.vms.values()
    ]
    assert {launch.copies_shares for launch in messages} == {job.view.copies_shares}
    return [launch.copies_shares for launch in messages]


@pytest.mark.parametrize(
    ("facts", "kept"), [(WILD, "copies of states and marks"), (CopiesFacts(step_s=5.0), "no copies")]
)
async def test_what_was_chosen_stays_and_is_told(world: RestWorld, facts: CopiesFacts, kept: str) -> None:
    are_kept = facts is WILD
    await add_job(world)
    await start(world, facts)
    assert await read_launches(world) == [are_kept] * len(VMS)
    [generation] = (await world.ask("GET", "/api/v1/jobs/j/generations")).json()
    assert generation["copies_reason"].startswith(f"{kept} are kept: about ")
    [event] = (await world.ask("GET", "/api/v1/events?kind=generation_started")).json()
    assert event["message"].endswith(f": test; {generation['copies_reason']}")
    assert (len(event["data"]["keepers"]), event["data"]["copies_shares"]) == (2 * are_kept, are_kept)
    assert len(generation["keepers"]) == 2 * are_kept


@pytest.mark.parametrize(("wish", "are_kept"), [("on", True), ("off", False)])
async def test_the_job_file_decides_without_figures(world: RestWorld, wish: str, are_kept: bool) -> None:
    await add_job(world)
    await world.change("j", spec={**SPEC, "copies": wish})
    await start(world, WILD)
    async with world.database.read() as session:
        [row] = await session.scalars(select(GenerationRow))
    assert (len(row.keepers or ()), row.copies_shares, row.copies_reason) == (2 * are_kept, are_kept, None)


@pytest.mark.parametrize("column", ["zone", "pool"])
async def test_a_copy_lies_in_another_zone_on_every_cloud(world: RestWorld, column: str) -> None:
    zones = dict(zip(VMS, ("a", "a", "b", "b"), strict=True))
    await add_job(world)
    async with world.database.write() as session:
        for number, vm_id in enumerate(VMS):
            row = await session.get_one(VmRow, vm_id)
            row.host, row.ref = f"10.0.0.{number}", {"zone": zones[vm_id], "type": "a2-highgpu-1g"}
            setattr(row, column, zones[vm_id])
    await world.change("j", spec={**SPEC, "copies": "on"})
    await start(world, WILD, replace(START, plan=replace(PLAN, p=4, d=1)))
    async with world.database.read() as session:
        [generation] = await session.scalars(select(GenerationRow))
    assert len(generation.keepers) == len(VMS)
    for owner, keeper in enumerate(generation.keepers):
        assert zones[VMS[owner]] != zones[VMS[keeper]]


async def test_the_generation_of_an_earlier_version_has_what_its_job_file_says(world: RestWorld) -> None:
    await add_job(world)
    await start(world, WILD)
    async with world.database.write() as session:
        [row] = await session.scalars(select(GenerationRow))
        row.copies_shares = None
    for wish, are_kept in (("auto", True), ("off", False)):
        await world.change("j", spec={**SPEC, "copies": wish})
        assert await read_launches(world) == [are_kept] * len(VMS)


async def test_the_newest_checkpoint_is_one_that_was_reported_or_that_the_job_began_with(world: RestWorld) -> None:
    await add_job(world)
    await start(world, WILD)
    async with world.database.write() as session:
        assert await read_saved_step(session, "j") == 0
        [generation] = await session.scalars(select(GenerationRow))
        generation.resumed_step = 7
        await session.flush()
        assert await read_saved_step(session, "j") == 7
        for step in (9, 12):
            url = f"file:///store/varuna_ckpt_{step}"
            session.add(CheckpointRow(job_id="j", generation=1, step=step, url=url, total_bytes=1, at=1.0))
        await session.flush()
        assert await read_saved_step(session, "j") == 12


async def test_what_workers_cannot_keep_is_told_and_not_counted_on(world: RestWorld) -> None:
    await add_job(world)
    await start(world, WILD)
    events = world.events
    reports = ReportService(world.database, events, PlanningService(), Bell())
    result = pb.StepResult(step=1, loss=1.0, step_us=1000, examples=8, copies_obstacle="rank 1: no room")

    async def report(step: int) -> None:
        result.step = step
        fact = pb.StepsCompleted(job_id="j", generation=1, steps=[result])
        await reports.apply_reports("vm-0", [pb.Report(number=step, steps_completed=fact)])

    for step in (1, 2):
        await report(step)
    [event] = (await world.ask("GET", "/api/v1/events?kind=copies_not_kept")).json()
    assert event["message"] == (
        "generation 1 keeps less than it was to: no copies of states are kept: rank 1: no room. Its workers save as "
        "often as without copies"
    )
    result.marks_obstacle = "rank 0: none"
    await report(3)
    assert len((await world.ask("GET", "/api/v1/events?kind=copies_not_kept")).json()) == 2
    [generation] = (await world.ask("GET", "/api/v1/jobs/j/generations")).json()
    assert (generation["copies_obstacle"], generation["marks_obstacle"]) == ("rank 1: no room", "rank 0: none")
    assert len(generation["keepers"]) == 2, "what was chosen stays"
    async with controller_over(world, VMS) as over:
        [job] = (await over.loader.load_snapshot()).jobs
    assert job.view.generation is not None
    assert (job.view.generation.keepers, job.view.copies_shares) == ((), False)
    assert job.asks_for_marks


async def test_the_controller_weighs_copies_when_training_starts(world: RestWorld) -> None:
    await add_job(world, profile_json=profile_json(4), profiled_at=2.0)
    await world.change("j", spec={**SPEC, "plan": {"p": 2, "d": 2}})
    async with controller_over(world, VMS) as over:
        await over.controller.reconcile_once()
    async with world.database.read() as session:
        [row] = await session.scalars(select(GenerationRow))
    assert row.kind == "training"
    assert row.copies_shares is False
    assert (row.copies_reason or "").startswith("no copies are kept: about ")
