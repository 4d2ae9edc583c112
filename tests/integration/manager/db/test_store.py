"""The store, on SQLite and on PostgreSQL: migrations, guarded updates, upserts, idempotent reports, events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, event, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm.exc import StaleDataError

from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.answers.errors import ConflictError, InvalidError
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.db.engine import Database, normalised_url
from varuna_manager.db.job_progress import sum_up_all
from varuna_manager.db.models import Base, EventRow, GenerationRow, JobRow, MetricRow, VmRow, WorkerRow
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.setbacks import Setbacks
from varuna_manager.domain.spec import CheckpointSpec, JobSpec
from varuna_manager.domain.states import IllegalTransitionError, JobState, WorkerState
from varuna_manager.history.job_history import JobHistory
from varuna_manager.history.step_metrics import StepMetrics
from varuna_manager.jobs.jobs import KEY_LIFE_S, JobService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import Health, VmRegistry
from varuna_manager.world.world import World
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S

SPEC = JobSpec(name="train", workdir="/w", run="true", global_batch=8)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def events(database: Database, clock: Clock) -> EventLog:
    return EventLog(database, clock)


@pytest.fixture
def jobs(database: Database, events: EventLog, clock: Clock) -> JobService:
    return JobService(database, events, Bell(), clock)


@pytest.fixture
def sessions() -> AgentSessions:
    return AgentSessions()


@pytest.fixture
def reports(database: Database, events: EventLog, clock: Clock, sessions: AgentSessions) -> ReportService:
    return ReportService(database, events, PlanningService(), Bell(), clock, sessions=sessions)


async def add_generation(
    database: Database, job_id: str, number: int, vm_id: str = "vm", kind: str = "training"
) -> None:
    async with database.write() as session:
        session.add(
            GenerationRow(
                job_id=job_id,
                number=number,
                kind=kind,
                state="launching",
                history=[],
                plan=Plan(p=1, d=1, micro_batch=1, global_batch=8).to_document(),
                candidates=[],
                rendezvous_host="h",
                rendezvous_port=1,
                reason="test",
                created_at=50.0,
            )
        )
        session.add(
            WorkerRow(job_id=job_id, generation=number, rank=0, vm_id=vm_id, local_rank=0, state="assigned", history=[])
        )


async def generations(database: Database, job_id: str, registry: VmRegistry | None = None) -> list[Any]:
    history = JobHistory(database, registry or VmRegistry(), lambda: 1000.0)
    page = await history.list_generations(job_id, brief=False, descending=False, limit=100, cursor=None)
    return page.items


async def checkpoints(database: Database, job_id: str) -> list[Any]:
    history = JobHistory(database, VmRegistry())
    return (await history.list_checkpoints(job_id, descending=False, limit=100, cursor=None)).items


async def test_migrations_give_what_the_models_say(database: Database) -> None:
    def differences(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))

    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await database.migrate_schema()  # again: nothing to do


async def test_a_writer_that_is_cancelled_leaves_the_store_to_the_next_one(
    database: Database, events: EventLog
) -> None:
    """Also while the cancelled task exists, whose traceback has the statement that it had begun."""

    def cancel_writing(*statement: object) -> None:
        if not writing.cancelling():
            writing.cancel()  # this task, which waits for the statement next

    async def write(kind: str) -> None:
        async with database.write() as session:
            for number in range(2):  # several return their keys, and keep their statement until these are read
                events.emit_event(session, kind, f"something happened {number}")

    await write("before")
    event.listen(database.engine.sync_engine, "before_cursor_execute", cancel_writing)
    writing = asyncio.create_task(write("cancelled"))
    kept = await asyncio.gather(writing, return_exceptions=True)
    assert isinstance(kept[0], asyncio.CancelledError)
    await write("whole")
    async with database.read() as session:
        assert list(await session.scalars(select(EventRow.kind))) == ["before"] * 2 + ["whole"] * 2


async def test_a_task_that_is_cancelled_as_its_connection_goes_back_is_no_fault(
    database: Database, events: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    def cancel_giving_back(*reset: object) -> None:
        giving_back = asyncio.current_task()
        assert giving_back
        giving_back.cancel()  # it waits for the rollback next

    async def read() -> list[str]:
        async with database.read() as session:
            return list(await session.scalars(select(EventRow.kind)))

    event.listen(database.engine.sync_engine.pool, "reset", cancel_giving_back, once=True)
    [cancelled] = await asyncio.gather(read(), return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [record.getMessage() for record in caplog.records] == []
    assert await read() == []


async def test_an_update_of_what_somebody_else_changed_fails(database: Database, jobs: JobService) -> None:
    job = await jobs.submit_job(SPEC, None)
    other = Database(database.url)  # as another process would

    async def write_late() -> None:
        async with database._sessions() as session:
            row = await session.get_one(JobRow, job["id"])
            async with other.write() as rival:
                (await rival.get_one(JobRow, job["id"])).reason = "first"
            row.reason = "second"
            await session.commit()

    # SQLite may see it before the version does: the late writer's snapshot is of the past.
    with pytest.raises((StaleDataError, OperationalError)):
        await write_late()
    await other.close()
    async with database.read() as session:
        assert (await session.get_one(JobRow, job["id"])).reason == "first"


async def test_an_illegal_transition_carries_the_rows_history(database: Database, jobs: JobService) -> None:
    job = await jobs.submit_job(SPEC, None)
    async with database.read() as session:
        row = await session.get_one(JobRow, job["id"])
        with pytest.raises(IllegalTransitionError, match=r"queued to cancelled.*queued \(submitted\)"):
            row.move_to_state(JobState.CANCELLED, now=1.0, reason="no")


async def test_names_are_unique_among_jobs_that_are_not_over(jobs: JobService, database: Database) -> None:
    first = await jobs.submit_job(SPEC, "key")
    assert (await jobs.submit_job(SPEC, "key"))["id"] == first["id"]
    with pytest.raises(ConflictError, match="with another spec"):
        await jobs.submit_job(SPEC.model_copy(update={"run": "false"}), "key")
    with pytest.raises(ConflictError, match="'train' is already queued"):
        await jobs.submit_job(SPEC, None)
    async with database.write() as session:
        row = await session.get_one(JobRow, first["id"])
        row.move_to_state(JobState.FAILED, now=1.0, reason="test")
        row.active_name = None
    assert (await jobs.submit_job(SPEC, None))["id"] != first["id"]


async def test_an_idempotency_key_means_the_same_job_for_a_day(
    database: Database, jobs: JobService, clock: Clock
) -> None:
    first = await jobs.submit_job(SPEC, "key")
    async with database.write() as session:  # as a version stored it that knew fewer fields
        row = await session.get_one(JobRow, first["id"])
        row.spec = {name: value for name, value in row.spec.items() if name != "profile_only"}
        row.active_name = None
    clock.now += KEY_LIFE_S - 1
    assert (await jobs.submit_job(SPEC, "key"))["id"] == first["id"]
    clock.now += 1
    second = await jobs.submit_job(SPEC.model_copy(update={"run": "false"}), "key")
    assert second["id"] != first["id"]
    assert len((await jobs.list_jobs(limit=10)).items) == 2


async def test_what_is_asked_twice_happens_once(database: Database, jobs: JobService, events: EventLog) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    first = await jobs.cancel_job(job_id)
    assert (await jobs.cancel_job(job_id)) == first
    async with database.write() as session:
        (await session.get_one(JobRow, job_id)).move_to_state(JobState.CANCELLED, now=1.0, reason="test")
    assert (await jobs.cancel_job(job_id))["state"] == "cancelled"
    emitted = [event.kind for event in await events.list_events_after(0, job_id=job_id)]
    assert emitted.count("job_cancelling") == 1


async def test_a_job_keeps_the_place_of_its_checkpoints_whoever_leads_later(
    database: Database, events: EventLog
) -> None:
    async def url_of(document: dict[str, Any]) -> str | None:
        async with database.read() as session:
            return (await session.get_one(JobRow, document["id"])).checkpoint_url

    jobs = JobService(database, events, Bell(), checkpoint_root="s3://bucket/jobs/")
    job = await jobs.submit_job(SPEC, None)
    assert await url_of(job) == f"s3://bucket/jobs/{job['id']}"
    own = SPEC.model_copy(update={"name": "own", "checkpoint": CheckpointSpec(url="file:///mine")})
    assert await url_of(await jobs.submit_job(own, None)) == "file:///mine"
    placeless = JobService(database, events, Bell(), no_root_because="nobody reaches it")
    with pytest.raises(InvalidError, match=r"'other' names no place .* because nobody reaches it: give checkpoint.url"):
        await placeless.submit_job(SPEC.model_copy(update={"name": "other"}), None)
    await placeless.submit_job(own.model_copy(update={"name": "own too"}), None)


def steps(job_id: str, generation: int, *numbers: int, loss: float = 1.0) -> pb.Report:
    results = [pb.StepResult(step=number, loss=loss, step_us=1000, examples=8) for number in numbers]
    return pb.Report(number=1, steps_completed=pb.StepsCompleted(job_id=job_id, generation=generation, steps=results))


async def test_steps_that_are_not_finite_in_a_row_are_one_event_at_their_beginning_and_one_at_their_end(
    database: Database, jobs: JobService, events: EventLog, reports: ReportService
) -> None:
    async def report(generation: int, losses: dict[int, float], skipped: Iterable[int] = ()) -> None:
        whole = steps(job_id, generation, *losses)
        for step in whole.steps_completed.steps:
            step.loss, step.skipped = losses[step.step], step.step in skipped
        await reports.apply_reports("vm", [whole])
        await reports.apply_reports("vm", [whole])  # its acknowledgement was lost

    async def found() -> list[tuple[str, int, Any]]:
        kinds = ["loss_not_finite", "loss_finite_again"]
        rows = await events.list_events_after(0, job_id=job_id, kinds=kinds)
        return [(row.kind, row.generation or 0, row.data) for row in rows]

    nan = math.nan
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    await report(1, {1: 1.0, 2: nan, 3: nan}, skipped=(2, 3))
    job = await jobs.find_job(job_id)
    assert (job["step"], job["loss"], job["not_finite_from"], job["steps_skipped"]) == (3, None, 2, 2)
    begun = ("loss_not_finite", 1, {"step": 2, "loss": "nan", "skipped": True})
    assert await found() == [begun]
    await report(1, {4: 1.5}, skipped=(4,))  # only its gradient
    assert await found() == [begun]
    await report(1, {5: 1.0})
    job = await jobs.find_job(job_id)
    assert (job["loss"], job["not_finite_from"], job["steps_skipped"]) == (1.0, None, 3)
    ended = ("loss_finite_again", 1, {"step": 5, "first_step": 2, "steps_skipped": 3})
    assert await found() == [begun, ended]
    # Within one report: the first beginning and the last end, and where the newest steps in a row begin.
    await report(1, {6: nan, 7: 1.0, 8: math.inf, 9: 1.0, 10: nan, 11: nan})
    assert (await found())[2:] == [("loss_not_finite", 1, {"step": 6, "loss": "nan", "skipped": False})]
    assert (await jobs.find_job(job_id))["not_finite_from"] == 10
    messages = [row.message for row in await events.list_events_after(0, job_id=job_id, kinds=["loss_not_finite"])]
    assert messages == [
        "the loss of step 2 is not finite (loss nan): the step updated nothing",
        "the loss of step 6 is not finite (loss nan): the step made its update (on_nonfinite: go_on)",
    ]


async def test_a_job_that_begins_with_steps_of_another_says_so_once(
    database: Database, jobs: JobService, events: EventLog, reports: ReportService
) -> None:
    spec = SPEC.model_copy(update={"checkpoint": CheckpointSpec(url="file:///kept")})
    job_id = (await jobs.submit_job(spec, None))["id"]
    await add_generation(database, job_id, 1)
    fact = pb.WorkerStarted(job_id=job_id, generation=1, rank=0, pid=1, resumed_step=8)
    for _ in range(2):  # the acknowledgement of the first was lost
        await reports.apply_reports("vm", [pb.Report(number=1, worker_started=fact)])
    assert (await jobs.find_job(job_id))["step"] == 8
    await add_generation(database, job_id, 2)
    again = pb.WorkerStarted(job_id=job_id, generation=2, rank=0, pid=1, resumed_step=8)
    await reports.apply_reports("vm", [pb.Report(number=1, worker_started=again)])
    found = await events.list_events_after(0, job_id=job_id, kinds=["resumed"])
    assert [(event.generation, event.data) for event in found] == [(1, {"step": 8})]
    assert found[0].message.startswith("generation 1 begins at step 8, from a checkpoint in file:///kept that")
    async with database.write() as session:
        await sum_up_all(session)
    assert (await jobs.find_job(job_id))["step"] == 8


def left(job_id: str, rank: int, obstacle: str, generation: int = 1) -> pb.Report:
    fact = pb.WorkerExited(
        job_id=job_id,
        generation=generation,
        rank=rank,
        cause=pb.EXIT_CAUSE_PEER_LOST,
        script_obstacle=obstacle,
        held=pb.HeldState(step=3, gives_only=True),
    )
    return pb.Report(number=1, worker_exited=fact)


async def test_what_keeps_workers_from_going_on_in_place_is_an_event_once(
    database: Database, jobs: JobService, events: EventLog, reports: ReportService
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    for number in (1, 2):
        await add_generation(database, job_id, number)
        async with database.write() as session:
            session.add(WorkerRow(job_id=job_id, generation=number, rank=1, vm_id="vm", local_rank=1, state="running"))
    copies, groups = "it copies its batches; pass them as they are", "it has process groups"
    await reports.apply_reports("vm", [left(job_id, 0, copies), left(job_id, 1, copies)])
    restarted = ReportService(database, events, PlanningService(), Bell())
    await restarted.apply_reports("vm", [left(job_id, 0, copies)])  # its acknowledgement was lost
    await restarted.apply_reports("vm", [left(job_id, 0, copies, 2), left(job_id, 1, groups, 2)])
    found = await events.list_events_after(0, job_id=job_id, kinds=["reshape_not_possible"])
    assert [(event.generation, event.data) for event in found] == [(1, {"reason": copies}), (2, {"reason": groups})]
    assert found[0].message == f"after a loss this job restarts, because its workers cannot go on in place: {copies}"


async def test_a_redone_step_is_overwritten_by_the_newer_generation_only(
    database: Database, jobs: JobService, reports: ReportService, clock: Clock
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    await reports.apply_reports("vm", [steps(job_id, 1, 1, 2, 3, loss=1.0)])
    await add_generation(database, job_id, 2)
    clock.now += 7.0
    await reports.apply_reports("vm", [steps(job_id, 2, 3, 4, loss=2.0)])
    await reports.apply_reports("vm", [steps(job_id, 1, 3, loss=9.0), steps(job_id, 2, 4, loss=2.0)])
    async with database.read() as session:
        rows = (await session.scalars(select(MetricRow).order_by(MetricRow.step))).all()
    assert [(row.step, row.loss, row.generation) for row in rows] == [
        (1, 1.0, 1),
        (2, 1.0, 1),
        (3, 2.0, 2),
        (4, 2.0, 2),
    ]
    second = (await generations(database, job_id))[1]
    assert (second["resumed_step"], second["steps_redone"], second["last_step"]) == (2, 1, 4)
    assert second["seconds_without_progress"] == 7.0
    assert second["state"] == "running"


async def test_a_loss_that_is_not_a_number_is_stored_as_none(
    database: Database, jobs: JobService, reports: ReportService
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    await reports.apply_reports("vm", [steps(job_id, 1, 1, loss=float("nan"))])
    assert [row["loss"] for row in await StepMetrics(database).list_steps(job_id, 0, 10)] == [None]


async def test_reports_that_come_again_change_nothing(
    database: Database, jobs: JobService, reports: ReportService
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    async with database.write() as session:
        session.add(VmRow(id="vm", provider="local", state="ready", history=[], gpus=1, ref={}, created_at=1.0))
    key = {"job_id": job_id, "generation": 1}
    batch = [
        pb.Report(number=1, worker_started=pb.WorkerStarted(**key, rank=0, pid=7, resumed_step=0)),
        steps(job_id, 1, 1),
        pb.Report(number=3, checkpoint_committed=pb.CheckpointCommitted(**key, step=1, url="u", total_bytes=2)),
        pb.Report(number=4, preemption_notice=pb.PreemptionNotice(notice_id="n", seconds_left=30, source="s")),
        pb.Report(number=5, profile_measured=pb.ProfileMeasured(**key, profile_json="no profile")),
        pb.Report(
            number=6,
            worker_exited=pb.WorkerExited(**key, rank=0, cause=pb.EXIT_CAUSE_KILLED, exit_code=-9, error_text="x"),
        ),
        pb.Report(number=7, worker_exited=pb.WorkerExited(job_id="who", generation=1, rank=0)),
        pb.Report(number=8, command_refused=pb.CommandRefused(**key, reason="too old")),
    ]

    async def everything() -> list[Any]:
        async with database.read() as session:
            vm = await session.get_one(VmRow, "vm")
            worker = await session.get_one(WorkerRow, (job_id, 1, 0))
            emitted = [(event.kind, event.message) for event in await session.scalars(select(EventRow))]
            return [emitted, vm.notice_deadline, worker.state, worker.cause, await generations(database, job_id)]

    await reports.apply_reports("vm", batch)
    before = await everything()
    await reports.apply_reports("vm", batch)
    assert await everything() == before
    assert before[1:4] == [130.0, WorkerState.EXITED.value, "killed"]
    assert "profile_rejected" in [kind for kind, _ in before[0]]


async def test_of_several_notices_the_first_to_come_due_counts(database: Database, reports: ReportService) -> None:
    """On EC2 an interruption in two minutes may follow a recommendation to rebalance within ten."""
    async with database.write() as session:
        session.add(VmRow(id="vm", provider="local", state="ready", history=[], gpus=1, ref={}, created_at=1.0))
    seen = []
    for number, (notice_id, left_s) in enumerate([("r", 600.0), ("i", 120.0), ("i", 119.5), ("later", 500.0)], 1):
        notice = pb.PreemptionNotice(notice_id=notice_id, seconds_left=left_s, source="aws")
        await reports.apply_reports("vm", [pb.Report(number=number, preemption_notice=notice)])
        async with database.read() as session:
            vm = await session.get_one(VmRow, "vm")
            messages = [event.message for event in await session.scalars(select(EventRow))]
        seen.append((vm.notice_id, vm.notice_deadline, len(messages)))
    assert seen == [("r", 700.0, 1), ("i", 220.0, 2), ("i", 220.0, 2), ("i", 220.0, 2)]
    assert messages == ["VM vm has notice to leave (aws)", "VM vm is to leave earlier than it had notice of (aws)"]


async def test_where_a_workdir_could_not_be_made_ready_is_kept_once_for_each_report_until_the_job_is_retried(
    database: Database, jobs: JobService, reports: ReportService, sessions: AgentSessions
) -> None:
    job_id = str((await jobs.submit_job(SPEC, None))["id"])
    for vm_id in ("a", "b", *(f"vm-{number}" for number in range(100))):
        agent = AgentSession(vm_id, "1", ())
        agent.send(pb.ManagerMessage(prepare=pb.Prepare(job_id=job_id)))
        sessions.add_session(agent)

    def failed(number: int, exit_code: int = 0) -> pb.Report:
        fact = pb.SetupFailed(job_id=job_id, exit_code=exit_code, error_text="no disk")
        return pb.Report(number=number, setup_failed=fact)

    async def known() -> Any:
        async with database.read() as session:
            found = (await session.get_one(JobRow, job_id)).setup_failures
        return {vm_id: (failure["times"], failure["exit_code"]) for vm_id, failure in (found or {}).items()}

    assert await known() == {}
    for number in (1, 1, 2):  # the first one's acknowledgement was lost
        await reports.apply_reports("a", [failed(number)])
    await reports.apply_reports("b", [failed(1, exit_code=7)])
    await reports.apply_reports("who was asked for none", [failed(1)])
    assert await known() == {"a": (2, None), "b": (1, 7)}
    for number in range(100):
        await reports.apply_reports(f"vm-{number}", [failed(1)])
    assert len(await known()) == 64
    assert "vm-99" in await known()
    await jobs.cancel_job(job_id)
    async with database.write() as session:
        job = await session.get_one(JobRow, job_id)
        job.move_to_state(JobState.CANCELLED, now=1.0, reason="test")
        job.active_name = None
    await jobs.retry_job(job_id)
    assert await known() == {}


async def test_a_report_that_cannot_be_stored_is_dropped_and_the_others_are_not(
    database: Database, jobs: JobService, reports: ReportService
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    absurd = pb.CheckpointCommitted(job_id=job_id, generation=1, step=2**64 - 1, url="u", total_bytes=1)
    await reports.apply_reports("vm", [pb.Report(number=1, checkpoint_committed=absurd), steps(job_id, 1, 1)])
    assert [metric["step"] for metric in await StepMetrics(database).list_steps(job_id, 0, 10)] == [1]
    assert await checkpoints(database, job_id) == []


async def test_the_log_tells_of_the_first_checkpoint_of_a_generation_and_the_table_has_all(
    database: Database, events: EventLog, jobs: JobService, reports: ReportService
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    for number in (1, 2):
        await add_generation(database, job_id, number)
    saved = [
        pb.CheckpointCommitted(job_id=job_id, generation=generation, step=step, url="u", total_bytes=10**6)
        for generation, step in ((1, 2), (1, 4), (2, 6), (1, 8))
    ]
    for number, fact in enumerate(saved, 1):
        await reports.apply_reports("vm", [pb.Report(number=number, checkpoint_committed=fact)])
    emitted = [
        event.message for event in await events.list_events_after(0, job_id=job_id) if event.kind == "checkpoint"
    ]
    assert emitted == [
        "step 2 is saved (976.6 KiB), the first of generation 1",
        "step 6 is saved (976.6 KiB), the first of generation 2",
    ]
    assert sorted(one["step"] for one in await checkpoints(database, job_id)) == [2, 4, 6, 8]


async def test_events_are_followed_in_order_and_only_once_committed(database: Database, events: EventLog) -> None:
    followed: list[str] = []

    async def follow() -> None:
        async for row in events.follow_events(0):
            if row is not None:
                followed.append(row.message)
            if len(followed) == 3:
                return

    async def write_and_fail() -> None:
        async with database.write() as session:
            events.emit_event(session, "test", "never")
            raise RuntimeError("rolled back")

    following = asyncio.create_task(follow())
    async with database.write() as session:
        events.emit_event(session, "test", "one")
        events.emit_event(session, "test", "two")
    with pytest.raises(RuntimeError, match="rolled back"):
        await write_and_fail()
    async with database.write() as session:
        events.emit_event(session, "test", "three")
    await asyncio.wait_for(following, DEADLINE_S)
    assert followed == ["one", "two", "three"]


@pytest.mark.parametrize("url", ["mysql://x/y", "manager.db"])
def test_other_databases_are_refused_with_what_is_taken(url: str) -> None:
    with pytest.raises(ValueError, match="give sqlite:///"):
        normalised_url(url)


async def test_a_snapshot_tells_what_past_generations_say_against_a_job(database: Database, jobs: JobService) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    past = [("growth", 3), ("worker_failed", 5), ("worker_failed", 5), ("vm_lost", 4), ("hang", None)]
    for number, (cause, last_step) in enumerate(past, 1):
        await add_generation(database, job_id, number)
        async with database.write() as session:
            row = (await session.scalars(select(GenerationRow).where(GenerationRow.number == number))).one()
            row.state, row.end_cause, row.end_reason = "ended", cause, f"{cause} at {last_step}"
            row.last_step, row.ended_at = last_step, 10.0 * number
    loader = SnapshotLoader(database, World(database, VmRegistry()), Rules())
    (loaded,) = (await loader.load_snapshot()).jobs
    assert loaded.view.setbacks == Setbacks(
        reasons=("worker_failed at 5", "hang at None"), last_at=50.0, best_step=5, hangs=1
    )
    assert loaded.generation is not None
    assert loaded.generation.number == 5


async def test_a_manager_that_has_just_started_counts_on_the_vms_that_it_has_not_heard_yet(
    database: Database, jobs: JobService, clock: Clock
) -> None:
    await jobs.submit_job(SPEC, None)
    registry, rules = VmRegistry(), Rules()
    async with database.write() as session:
        for name in ("heard", "silent"):
            session.add(VmRow(id=name, provider="local", state="ready", history=[], gpus=1, ref={}, created_at=1.0))
    registry.add_hello("heard", rendezvous_port=1, workers=())
    loader = SnapshotLoader(database, World(database, registry, clock), rules, clock)
    assert [job.view.returning_vms for job in (await loader.load_snapshot()).jobs] == [1]
    clock.now += rules.start_settle_s
    assert [job.view.returning_vms for job in (await loader.load_snapshot()).jobs] == [0]


async def test_a_generation_shows_what_is_heard_of_its_own_workers(database: Database, jobs: JobService) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    registry = VmRegistry()
    registry.add_hello("vm", rendezvous_port=1, workers=[Health(job_id="other", generation=1, rank=0, step=9)])
    assert (await generations(database, job_id, registry))[0]["workers"][0]["step"] is None
    own = Health(job_id=job_id, generation=1, rank=0, step=4, forward_us=20)
    registry.add_heartbeat("vm", rendezvous_port=1, workers=[own])
    worker = (await generations(database, job_id, registry))[0]["workers"][0]
    assert (worker["step"], worker["forward_us"]) == (4, 20)


async def test_an_evaluation_is_progress(database: Database, jobs: JobService, clock: Clock) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    registry, rules = VmRegistry(lambda: clock.now), Rules()
    for vm_id in ("vm", "other"):
        registry.add_hello(vm_id, rendezvous_port=1, workers=())
    loader = SnapshotLoader(database, World(database, registry, clock), rules, clock)

    def beat(evaluated: int, generation: int = 1, vm: str = "vm") -> None:
        health = Health(job_id=job_id, generation=generation, rank=0, step=3, evaluated=evaluated)
        registry.add_heartbeat(vm, rendezvous_port=1, workers=[health])

    async def idle_s() -> float:
        (loaded,) = (await loader.load_snapshot()).jobs
        assert loaded.view.generation is not None
        return clock.now - loaded.view.generation.progress_at

    clock.now += 100
    beat(0)
    assert await idle_s() == 100, "nothing was evaluated"
    beat(10)
    assert await idle_s() == 0
    clock.now += 7
    beat(10)
    registry.add_hello("vm", rendezvous_port=1, workers=[Health(job_id=job_id, generation=1, rank=0, step=3)])
    beat(10)
    beat(50, generation=2, vm="other")
    assert await idle_s() == 7, "the same count again, and another generation's, are no news"
    beat(11)
    assert await idle_s() == 0
    beat(11, generation=2)
    assert registry.evaluated_s(job_id, 1, {"vm"}) is None, "workers that are gone are forgotten"


async def test_the_first_step_counts_from_when_all_ranks_had_started(
    database: Database, jobs: JobService, reports: ReportService, clock: Clock
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    loader = SnapshotLoader(database, World(database, VmRegistry(), clock), Rules(), clock)

    async def since_s() -> float:
        (loaded,) = (await loader.load_snapshot()).jobs
        assert loaded.view.generation is not None
        return clock.now - loaded.view.generation.stepped_at

    clock.now = 50.0 + 12
    assert await since_s() == 12, "since it was made"
    started = pb.WorkerStarted(job_id=job_id, generation=1, rank=0, pid=1)
    await reports.apply_reports("vm", [pb.Report(number=1, worker_started=started)])
    clock.now += 5
    assert await since_s() == 5
    await reports.apply_reports("vm", [steps(job_id, 1, 1)])
    clock.now += 3
    assert await since_s() == 3


async def test_what_happens_while_a_vm_is_silent_is_not_held_against_its_workers(
    database: Database, jobs: JobService, clock: Clock
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    async with database.write() as session:
        session.add(VmRow(id="vm", provider="local", state="suspect", history=[], gpus=1, ref={}, created_at=1.0))
    registry = VmRegistry(lambda: clock.now)
    registry.add_hello("vm", rendezvous_port=1, workers=())
    loader = SnapshotLoader(database, World(database, registry, clock), Rules(), clock)

    async def idle_s() -> float:
        (loaded,) = (await loader.load_snapshot()).jobs
        assert loaded.view.generation is not None
        return clock.now - loaded.view.generation.progress_at

    clock.now += 45
    assert await idle_s() == 0, "no heartbeat could come from it"
    registry.add_heartbeat("vm", rendezvous_port=1, workers=())
    clock.now += 3
    assert await idle_s() == 3
    async with database.write() as session:
        (await session.get_one(VmRow, "vm")).state = "lost"
    clock.now += 45
    assert await idle_s() == 48, "its silence is judged already"


@pytest.mark.parametrize(
    ("mode", "held", "save_s"), [("save_first", False, 1.25), ("hold_first", False, 1.25), ("hold_first", True, 1.0)]
)
async def test_a_save_takes_what_its_slowest_rank_took_however_long_the_manager_was_away(
    database: Database, jobs: JobService, reports: ReportService, clock: Clock, mode: str, held: bool, save_s: float
) -> None:
    """A process that leaves with its state has not saved it; 1 s is the default."""
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    await add_generation(database, job_id, 1)
    async with database.write() as session:
        row = (await session.scalars(select(GenerationRow))).one()
        row.state, row.stop_mode, row.stop_cause, row.stop_requested_at = "stopping", mode, "notice", clock.now
        session.add(WorkerRow(job_id=job_id, generation=1, rank=1, vm_id="vm", local_rank=1, state="running"))
    clock.now += 114.0
    for rank, left_s in ((0, 1.25), (1, 0.75), (1, float("inf"))):
        exited = pb.WorkerExited(job_id=job_id, generation=1, rank=rank, cause=pb.EXIT_CAUSE_GENERATION_ENDED)
        exited.save_s = left_s
        if held:
            exited.held.step = 3
        await reports.apply_reports("vm", [pb.Report(number=1, worker_exited=exited)])
    async with database.write() as session:
        row = (await session.scalars(select(GenerationRow))).one()
        row.state, row.end_cause, row.ended_at = "ended", "notice", clock.now
    loader = SnapshotLoader(database, World(database, VmRegistry(), clock), Rules(), clock)
    (loaded,) = (await loader.load_snapshot()).jobs
    assert loaded.view.morphs.save_s == save_s
