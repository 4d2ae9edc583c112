"""The World follows each commit: it always equals the store, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

from varuna_manager.db.changes import name_changes
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import GenerationState, JobState, StopMode, VmState, WorkerState
from varuna_manager.fleet.fleet import workers_by_vm
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World, WorldView
from varuna_proto.plan import Plan

Change = Callable[[AsyncSession], Any]
PLAN = Plan(p=1, d=2, micro_batch=1, global_batch=8)


def add_vm(name: str) -> Change:
    return lambda session: session.add(
        VmRow(id=name, provider="local", state="ready", history=[], gpus=1, ref={}, created_at=1.0)
    )


def add_job(name: str) -> Change:
    spec = JobSpec(name=name, workdir="/w", run="true", global_batch=8)
    return lambda session: session.add(
        JobRow(
            id=name,
            name=name,
            active_name=name,
            spec=spec.model_dump(),
            state="running",
            history=[],
            created_at=float(ord(name)),
            profile_json="{}",
        )
    )


def add_generation(job_id: str, number: int, *vm_ids: str) -> Change:
    def change(session: AsyncSession) -> None:
        session.add(
            GenerationRow(
                job_id=job_id,
                number=number,
                kind="training",
                state="launching",
                history=[],
                plan=PLAN.to_document(),
                candidates=[],
                rendezvous_host="h",
                rendezvous_port=1,
                reason="test",
                created_at=50.0,
            )
        )
        for rank, vm_id in enumerate(vm_ids):
            row = WorkerRow(job_id=job_id, generation=number, rank=rank, vm_id=vm_id, local_rank=0)
            row.state, row.history = "assigned", []
            session.add(row)

    return change


def move_vm(name: str, state: VmState) -> Change:
    async def change(session: AsyncSession) -> None:
        (await session.get_one(VmRow, name)).move_to_state(state, now=60.0, reason="test")

    return change


def move_worker(job_id: str, number: int, rank: int, state: WorkerState) -> Change:
    async def change(session: AsyncSession) -> None:
        row = await session.get_one(WorkerRow, (job_id, number, rank))
        row.move_to_state(state, now=60.0, reason="test")
        if state is WorkerState.EXITED:
            row.cause, row.exit_code, row.error_text, row.stopped_at = "killed", -9, "it was killed", 60.0

    return change


def change_generation(job_id: str, number: int, change: Callable[[GenerationRow], None]) -> Change:
    async def apply(session: AsyncSession) -> None:
        query = select(GenerationRow).where(GenerationRow.job_id == job_id, GenerationRow.number == number)
        change((await session.scalars(query)).one())

    return apply


def stopping(row: GenerationRow) -> None:
    row.move_to_state(GenerationState.STOPPING, now=60.0, reason="test")
    row.stop_mode, row.stop_cause, row.stop_reason = StopMode.SAVE_FIRST.value, "growth", "test"
    row.stop_requested_at = 60.0


def ended(row: GenerationRow) -> None:
    row.move_to_state(GenerationState.ENDED, now=61.0, reason="test")
    row.ended_at, row.end_cause, row.end_reason = 61.0, "growth", "test"


async def progress(session: AsyncSession) -> None:
    """As reports write it: without the row's version."""
    step = update(GenerationRow).where(GenerationRow.job_id == "a", GenerationRow.number == 1)
    values = step.values(last_step=7, last_step_at=62.0, resumed_step=1)
    await session.execute(values, execution_options=name_changes(generations=[("a", 1)]))


async def measure(session: AsyncSession) -> None:
    (await session.get_one(JobRow, "a")).profile_json = '{"new": 1}'


async def finish(session: AsyncSession) -> None:
    (await session.get_one(JobRow, "b")).move_to_state(JobState.SUCCEEDED, now=63.0, reason="test")


CHANGES: list[list[Change]] = [
    [add_vm("x"), add_vm("y"), add_vm("z")],
    [add_job("a"), add_job("b")],
    [add_generation("a", 1, "x", "y"), add_generation("b", 1, "z")],
    [move_worker("a", 1, 0, WorkerState.RUNNING)],
    [
        move_worker("a", 1, 1, WorkerState.RUNNING),
        change_generation("a", 1, lambda row: row.move_to_state(GenerationState.RUNNING, now=60.0, reason="test")),
    ],
    [progress],
    [measure],
    [move_vm("x", VmState.SUSPECT), move_vm("y", VmState.DRAINING)],
    [change_generation("a", 1, stopping)],
    [move_worker("a", 1, 0, WorkerState.EXITED)],
    [move_vm("y", VmState.GONE), add_vm("w")],
    # The old one still has a worker on a VM that is gone when the next one starts.
    [change_generation("a", 1, ended), add_generation("a", 2, "x", "w")],
    [move_worker("a", 1, 1, WorkerState.LOST)],
    [move_worker("b", 1, 0, WorkerState.RUNNING), move_worker("a", 2, 1, WorkerState.RUNNING)],
    [finish],
    [move_worker("b", 1, 0, WorkerState.EXITED)],
]


def contents(world: WorldView) -> dict[str, Any]:
    """All that a view has of the store, by value."""
    newest, held = world.generations.newest, world.generations.by_key
    return {
        "vms": dict(world.vms),
        "jobs": [(job.row, job.spec) for job in world.jobs.values()],
        "newest": {job_id: newest[job_id].facts for job_id in world.jobs if job_id in newest},
        "progress": dict(world.progress),
        "workers": {key: (one.group.all, one.group.occupied, one.group.alive_on) for key, one in held.items()},
        "generations": {key: one.facts for key, one in held.items()},
        "pasts": {job_id: (world.find_past(job_id).setbacks, world.find_past(job_id).shapes) for job_id in world.jobs},
    }


async def test_what_is_remembered_is_what_is_in_the_store(database: Database) -> None:
    world = World(database, VmRegistry())
    seen = [contents(await world.load_view())]
    for changes in CHANGES:
        for change in changes:
            async with database.write() as session:
                made = change(session)
                if made is not None:
                    await made
        kept, anew = await world.load_view(), await World(database, VmRegistry()).load_view()
        assert contents(kept) == contents(anew)
        async with database.read() as session:
            assert kept.generations.busy == await workers_by_vm(session)
        seen.append(contents(kept))
    assert all(before != after for before, after in pairwise(seen)), "every change is seen"
    assert seen[-3]["workers"].keys() == {("a", 2), ("b", 1)}, "of older ones those with workers that have not stopped"
    assert seen[-1]["workers"].keys() == {("a", 2)}, "job b is over"


async def test_what_has_not_changed_is_not_read_again(database: Database) -> None:
    async with database.write() as session:
        for change in (add_vm("x"), add_vm("y"), add_job("a"), add_job("b")):
            change(session)
        await session.flush()
        for change in (add_generation("a", 1, "x"), add_generation("b", 1, "y")):
            change(session)
    world = World(database, VmRegistry())
    first, again = await world.load_view(), await world.load_view()
    assert again.vms is first.vms
    assert again.jobs is first.jobs
    assert again.generations is first.generations
    async with database.write() as session:
        await progress(session)
        await move_worker("b", 1, 0, WorkerState.RUNNING)(session)
        await move_vm("y", VmState.SUSPECT)(session)
    later = await world.load_view()
    assert later.progress["a", 1] != first.progress["a", 1]
    assert later.generations.newest["a"] is first.generations.newest["a"], "steps do not change what was decided on"
    assert later.vms["x"] is first.vms["x"]
    assert (later.vms["y"].state, first.vms["y"].state) == ("suspect", "ready"), "what was seen stays as it was"
    assert later.generations.by_key["a", 1].group is first.generations.by_key["a", 1].group
    assert later.generations.by_key["b", 1].group.all[0].state == "running"


async def test_what_was_rolled_back_never_was(database: Database) -> None:
    world = World(database, VmRegistry())
    before = contents(await world.load_view())

    async def write() -> None:
        async with database.write() as session:
            add_vm("x")(session)
            await session.flush()
            raise ValueError("changed my mind")

    with pytest.raises(ValueError, match="changed my mind"):
        await write()
    assert contents(await world.load_view()) == before


async def test_a_commit_of_which_nothing_is_known_has_the_world_read_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(database, VmRegistry())
    before = await world.load_view()
    commit = AsyncSessionTransaction.__aexit__

    async def lose_answer(self: AsyncSessionTransaction, *error: Any) -> None:
        await commit(self, *error)
        raise ConnectionError("the answer was lost")

    async def write() -> None:
        async with database.write() as session:
            add_vm("x")(session)

    with monkeypatch.context() as patch:
        patch.setattr(AsyncSessionTransaction, "__aexit__", lose_answer)
        with pytest.raises(ConnectionError):
            await write()
    assert (await world.load_view()).vms.keys() == before.vms.keys() | {"x"}


async def test_a_plain_statement_names_what_it_changes(database: Database) -> None:
    async with database.write() as session:
        with pytest.raises(TypeError, match="must name the rows of vms"):
            await session.execute(update(VmRow).values(gpus=2))


async def test_a_version_that_the_world_has_missed_has_it_read_again(database: Database) -> None:
    async with database.write() as session:
        add_vm("x")(session)
    world = World(database, VmRegistry())
    held = (await world.load_view()).vms["x"]
    async with database.engine.begin() as elsewhere:
        await elsewhere.execute(update(VmRow.__table__).values(gpus=2, version=VmRow.version + 1))
    world.check_version(held, held.version)
    assert (await world.load_view()).vms["x"] is held
    world.check_version(held, held.version + 1)
    assert (await world.load_view()).vms["x"].gpus == 2
