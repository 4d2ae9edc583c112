"""What is remembered from look to look is what a look without memory would read; the same is not read again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.controllers.store_rows import BusyVms, StoreReader, StoreRows
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.observed import Plan
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import GenerationState, JobState, StopMode, VmState, WorkerState
from varuna_manager.services.fleet import workers_by_vm

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
        (await session.get_one(VmRow, name)).move(state, now=60.0, reason="test")

    return change


def move_worker(job_id: str, number: int, rank: int, state: WorkerState) -> Change:
    async def change(session: AsyncSession) -> None:
        row = await session.get_one(WorkerRow, (job_id, number, rank))
        row.move(state, now=60.0, reason="test")
        if state is WorkerState.EXITED:
            row.cause, row.exit_code, row.error_text, row.stopped_at = "killed", -9, "it was killed", 60.0

    return change


def change_generation(job_id: str, number: int, change: Callable[[GenerationRow], None]) -> Change:
    async def apply(session: AsyncSession) -> None:
        query = select(GenerationRow).where(GenerationRow.job_id == job_id, GenerationRow.number == number)
        change((await session.scalars(query)).one())

    return apply


def stopping(row: GenerationRow) -> None:
    row.move(GenerationState.STOPPING, now=60.0, reason="test")
    row.stop_mode, row.stop_cause, row.stop_reason = StopMode.SAVE_FIRST.value, "growth", "test"
    row.stop_requested_at = 60.0


def ended(row: GenerationRow) -> None:
    row.move(GenerationState.ENDED, now=61.0, reason="test")
    row.ended_at, row.end_cause, row.end_reason = 61.0, "growth", "test"


async def progress(session: AsyncSession) -> None:
    """As reports write it: without the row's version."""
    step = update(GenerationRow).where(GenerationRow.job_id == "a", GenerationRow.number == 1)
    await session.execute(step.values(last_step=7, last_step_at=62.0, resumed_step=1))


async def measure(session: AsyncSession) -> None:
    (await session.get_one(JobRow, "a")).profile_json = '{"new": 1}'


async def finish(session: AsyncSession) -> None:
    (await session.get_one(JobRow, "b")).move(JobState.SUCCEEDED, now=63.0, reason="test")


CHANGES: list[list[Change]] = [
    [add_vm("x"), add_vm("y"), add_vm("z")],
    [add_job("a"), add_job("b")],
    [add_generation("a", 1, "x", "y"), add_generation("b", 1, "z")],
    [move_worker("a", 1, 0, WorkerState.RUNNING)],
    [
        move_worker("a", 1, 1, WorkerState.RUNNING),
        change_generation("a", 1, lambda row: row.move(GenerationState.RUNNING, now=60.0, reason="test")),
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


def told(rows: StoreRows) -> dict[str, Any]:
    """All that a look is told, by value."""
    return {
        "vms": dict(rows.vms),
        "jobs": [(job.row.id, job.row.version, job.row.state, job.row.profile_json, job.spec) for job in rows.jobs],
        "newest": {
            job_id: (row.number, row.version, row.state, row.plan, row.stop_reason, row.end_reason)
            for job_id, row in rows.newest.items()
        },
        "progress": dict(rows.progress),
        "workers": {key: (workers.all, workers.occupied, workers.alive_on) for key, workers in rows.workers.items()},
        "generations": dict(rows.generations),
        "ended": dict(rows.ended),
    }


async def test_what_is_remembered_is_what_is_in_the_store(database: Database) -> None:
    reader, busy = StoreReader(), BusyVms()
    seen = []
    for changes in CHANGES:
        for change in changes:
            async with database.write() as session:
                made = change(session)
                if made is not None:
                    await made
        async with database.read() as session:
            kept, anew = told(await reader.read(session)), told(await StoreReader().read(session))
            assert kept == anew
            assert await busy.read(session) == await workers_by_vm(session)
        seen.append(kept)
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
    reader = StoreReader()
    async with database.read() as session:
        first, again = await reader.read(session), await reader.read(session)
    assert again.vms is first.vms
    assert all(one is other for one, other in zip(again.jobs, first.jobs, strict=True))
    assert all(again.newest[job_id] is first.newest[job_id] for job_id in "ab")
    assert all(again.workers[key] is first.workers[key] for key in first.workers)
    async with database.write() as session:
        await progress(session)
        await move_worker("b", 1, 0, WorkerState.RUNNING)(session)
        await move_vm("y", VmState.SUSPECT)(session)
    async with database.read() as session:
        later = await reader.read(session)
    assert later.progress["a"] != first.progress["a"]
    assert later.newest["a"] is first.newest["a"], "steps do not change what was decided on"
    assert later.vms["x"] is first.vms["x"]
    assert (later.vms["y"].state, first.vms["y"].state) == ("suspect", "ready"), "what was told stays as it was"
    assert later.workers["a", 1] is first.workers["a", 1]
    assert later.workers["b", 1].all[0].state == "running"
