"""An agent that lies about other users' jobs, with impossible numbers, and in texts that no store can hold.

The tests call the services that take its reports, over both stores. What holds against a hostile agent's own stream is
in `test_hostile_stream.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from sqlalchemy import select

from migrated_stores import migrated_url
from scripted_manager import profile_json
from varuna_manager.agents.report_bounds import MOST_STATE_BYTES
from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import JobState, WorkerState
from varuna_manager.fleet.documents import make_vm_document
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.jobs.jobs import JobService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import Health, VmRegistry
from varuna_proto.bounds import ERROR_CHARS, MOST_SECONDS, MOST_STEP
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb

VICTIM, OWN = "good", "hostile"
"""VMs: the victim's job runs on the first, the hostile agent's own job on the second."""


@dataclass
class HostileFleet:
    database: Database
    jobs: JobService
    reports: ReportService
    sessions: AgentSessions
    victim: str
    """Id of the job that runs on the other VM."""
    own: str
    """Id of the job that runs on the hostile agent's VM."""

    async def rows(self, job_id: str) -> dict[str, list[dict[str, Any]]]:
        """All that the store has of the job."""
        found = {}
        async with self.database.read() as session:
            for table in Base.metadata.sorted_tables:
                column = table.c.get("job_id", table.c.id if table.name == "jobs" else None)
                if column is not None:
                    rows = await session.execute(select(table).where(column == job_id))
                    found[table.name] = [dict(row._mapping) for row in rows]
        return found

    async def worker(self, job_id: str) -> WorkerRow:
        async with self.database.read() as session:
            return await session.get_one(WorkerRow, (job_id, 1, 0))


@pytest.fixture(params=["sqlite", "postgresql"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HostileFleet]:
    database = Database(migrated_url(request, tmp_path))
    events, bell, sessions = EventLog(database), Bell(), AgentSessions()
    jobs = JobService(database, events, bell)
    reports = ReportService(database, events, PlanningService(), bell, sessions=sessions)
    ids = {}
    for vm_id in (VICTIM, OWN):
        spec = JobSpec(name=f"of-{vm_id}", workdir="/w", run="true", global_batch=8, env={"SECRET": vm_id})
        ids[vm_id] = (await jobs.submit_job(spec, None))["id"]
        await add_generation(database, ids[vm_id], vm_id)
        sessions.add_session(AgentSession(vm_id, "i", ()))
    yield HostileFleet(database, jobs, reports, sessions, ids[VICTIM], ids[OWN])
    await database.close()


async def add_generation(database: Database, job_id: str, vm_id: str) -> None:
    async with database.write() as session:
        job = await session.get_one(JobRow, job_id)
        job.move_to_state(JobState.RUNNING, now=1.0, reason="test")
        session.add(
            GenerationRow(
                job_id=job_id,
                number=1,
                kind="training",
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
            WorkerRow(job_id=job_id, generation=1, rank=0, vm_id=vm_id, local_rank=0, state="assigned", history=[])
        )
        session.add(VmRow(id=vm_id, provider="local", state="ready", history=[], gpus=1, ref={}, created_at=1.0))


def facts(job_id: str) -> list[pb.Report]:
    """One report of each kind. Each would change something if it came from the right VM."""
    of: dict[str, Any] = {"job_id": job_id, "generation": 1}
    step = pb.StepResult(step=10**12, loss=0.0, step_us=1, examples=8)
    return [
        pb.Report(worker_started=pb.WorkerStarted(**of, rank=0, pid=1)),
        pb.Report(steps_completed=pb.StepsCompleted(**of, steps=[step, pb.StepResult(step=3, loss=1.0, step_us=1)])),
        pb.Report(values_logged=pb.ValuesLogged(**of, values=[pb.LoggedValue(name="evil", step=3, value=1.0)])),
        pb.Report(checkpoint_committed=pb.CheckpointCommitted(**of, step=3, url="file:///evil", total_bytes=1)),
        pb.Report(profile_measured=pb.ProfileMeasured(**of, profile_json=profile_json(2))),
        pb.Report(step_traced=pb.StepTraced(**of, rank=0, step=3)),
        pb.Report(command_refused=pb.CommandRefused(**of, reason="no")),
        pb.Report(worker_exited=pb.WorkerExited(**of, rank=0, cause=pb.EXIT_CAUSE_SCRIPT_FAILED, error_text="evil")),
        pb.Report(setup_failed=pb.SetupFailed(job_id=job_id, exit_code=1, error_text="evil")),
    ]


@pytest.mark.parametrize("change", [{"forward_us": 1e300}, {"output_bytes": 2**80}, {"micro_batch": 2**40}], ids=str)
async def test_a_profile_has_no_numbers_that_plans_cannot_be_made_of(
    world: HostileFleet, change: dict[str, float]
) -> None:
    document = json.loads(profile_json(2))
    document["sections"][0]["measurements"][-1] |= change
    document["environment"] = {"device": "a\0b"}
    for profile, kind in (
        (json.dumps(document), "profile_rejected"),
        ("\0", "profile_rejected"),
        (None, "profile_measured"),
    ):
        document["sections"] = json.loads(profile_json(2))["sections"]
        fact = pb.ProfileMeasured(
            job_id=world.own, generation=1, profile_json=profile or json.dumps(document), from_cache=True
        )
        await world.reports.apply_reports(OWN, [pb.Report(number=1, profile_measured=fact)])
        assert (await world.rows(world.own))["events"][-1]["kind"] == kind


def numbered(reports: list[pb.Report]) -> list[pb.Report]:
    for number, report in enumerate(reports, 1):
        report.number = number
    return reports


async def test_an_agent_says_nothing_about_jobs_that_are_not_on_its_vm(world: HostileFleet) -> None:
    before = await world.rows(world.victim)
    for report in numbered(facts(world.victim)):
        await world.reports.apply_reports(OWN, [report])
        assert await world.rows(world.victim) == before, report.WhichOneof("fact")
    await world.reports.apply_reports(VICTIM, numbered(facts(world.victim)))
    after = await world.rows(world.victim)
    assert {name for name in after if after[name] != before[name]} >= {
        "jobs",
        "generations",
        "workers",
        "metrics",
        "checkpoints",
        "events",
    }, "the same words count where the job runs"
    assert [metric["step"] for metric in after["metrics"]] == [3], "no training has so many steps"
    assert after["generations"][0]["last_step"] == 3


async def test_who_has_run_a_job_once_does_not_speak_of_it_any_more(world: HostileFleet) -> None:
    *_, exited, _ = facts(world.own)
    await world.reports.apply_reports(OWN, numbered([exited]))
    before = await world.rows(world.own)
    for report in numbered(facts(world.own)):
        if report.WhichOneof("fact") != "step_traced":  # that one is looked at, and decides nothing
            await world.reports.apply_reports(OWN, [report])
            assert await world.rows(world.own) == before, report.WhichOneof("fact")


async def test_a_setup_fails_a_job_only_where_it_was_asked_for(world: HostileFleet) -> None:
    failed = pb.Report(number=1, setup_failed=pb.SetupFailed(job_id=world.victim, exit_code=1, error_text="no pip"))
    await world.reports.apply_reports(OWN, [failed])
    assert (await world.rows(world.victim))["jobs"][0]["setup_error"] is None
    session = world.sessions.get(OWN)
    assert session is not None
    session.send(pb.ManagerMessage(prepare=pb.Prepare(job_id=world.victim, setup="pip install x")))
    await world.reports.apply_reports(OWN, [failed])
    assert (await world.rows(world.victim))["jobs"][0]["setup_error"] == f"on VM {OWN}: no pip"


@pytest.mark.parametrize("text", ["a\0b", "\0" * 100_000, "x" * 10_000_000, "\0"])
async def test_an_exit_is_never_dropped(world: HostileFleet, text: str) -> None:
    fact = pb.WorkerExited(job_id=world.own, generation=1, cause=pb.EXIT_CAUSE_SCRIPT_FAILED, error_text=text)
    await world.reports.apply_reports(OWN, [pb.Report(number=1, worker_exited=fact)])
    worker = await world.worker(world.own)
    assert worker.worker_state is WorkerState.EXITED
    assert worker.error_text is not None
    assert "\0" not in worker.error_text
    assert 0 < len(worker.error_text) <= ERROR_CHARS


async def test_an_archive_is_for_the_vms_that_run_or_prepare_its_job(world: HostileFleet, tmp_path: Path) -> None:
    archives, sha256 = ArchiveService(world.database, tmp_path), "a" * 64
    async with world.database.write() as session:
        (await session.get_one(JobRow, world.victim)).archive = sha256
    assert await archives.is_for((), VICTIM, sha256)
    assert not await archives.is_for((), OWN, sha256)
    assert not await archives.is_for([world.own], OWN, sha256)
    assert await archives.is_for([world.victim], OWN, sha256)
    async with world.database.write() as session:
        job = await session.get_one(JobRow, world.victim)
        job.move_to_state(JobState.FAILED, now=1.0, reason="test")
    assert not await archives.is_for([world.victim], OWN, sha256), "the job is over"


def test_what_one_agent_says_of_workers_elsewhere_is_not_heard() -> None:
    now = 100.0
    registry = VmRegistry(lambda: now)
    lies = [Health(job_id="job", generation=1, rank=rank, step=MOST_STEP, evaluated=9) for rank in (0, 1)]
    registry.add_hello(VICTIM, rendezvous_port=1, workers=[Health(job_id="job", generation=1, rank=0, step=4)])
    registry.add_hello(OWN, rendezvous_port=1, workers=lies)
    assert {rank: health.step for rank, health in registry.list_healths("job", 1, {0: VICTIM}).items()} == {0: 4}
    assert {rank: health.step for rank, health in registry.list_healths("job", 1, {0: VICTIM, 1: OWN}).items()} == {
        0: 4,
        1: MOST_STEP,
    }, "of its own rank it may report anything"
    assert registry.evaluated_s("job", 1, {VICTIM}) is None


@pytest.mark.parametrize(
    ("cause", "held", "recorded"),
    [
        (pb.EXIT_CAUSE_PEER_LOST, pb.HeldState(step=7, bytes=100), (7, 100)),
        (pb.EXIT_CAUSE_GENERATION_ENDED, pb.HeldState(), (0, 0)),
        (pb.EXIT_CAUSE_PEER_LOST, None, (None, None)),
        (pb.EXIT_CAUSE_PEER_LOST, pb.HeldState(step=2**63, bytes=1), (None, None)),
        (pb.EXIT_CAUSE_PEER_LOST, pb.HeldState(step=1, bytes=2**64 - 1), (1, MOST_STATE_BYTES)),
        (pb.EXIT_CAUSE_SCRIPT_FAILED, pb.HeldState(step=7, bytes=100), (7, 100)),
        (pb.EXIT_CAUSE_AGENT_ENDED, pb.HeldState(step=7, bytes=100), (7, 100)),
        (pb.EXIT_CAUSE_KILLED, pb.HeldState(step=7, bytes=100), (None, None)),
    ],
)
async def test_only_possible_state_is_counted_on(
    world: HostileFleet, cause: int, held: pb.HeldState | None, recorded: tuple[int | None, int | None]
) -> None:
    most = 2**64 - 1
    started = pb.WorkerStarted(job_id=world.own, generation=1, kept_bytes=most, peer_bytes=most)
    started.late_bytes = started.store_bytes = most
    exited = pb.WorkerExited(job_id=world.own, generation=1, cause=cause, held=held)
    late = pb.WorkerExited(
        job_id=world.own, generation=1, cause=pb.EXIT_CAUSE_PEER_LOST, held=pb.HeldState(step=9, bytes=9)
    )
    reports = [pb.Report(worker_started=started), pb.Report(worker_exited=exited), pb.Report(worker_exited=late)]
    await world.reports.apply_reports(OWN, numbered(reports))
    worker = await world.worker(world.own)
    assert (worker.held_step, worker.held_bytes) == recorded
    ends = (pb.EXIT_CAUSE_SCRIPT_FAILED, pb.EXIT_CAUSE_AGENT_ENDED)
    assert worker.held_gives_only is (cause in ends), "there is no process that could take a rank"
    assert worker.kept_bytes == worker.peer_bytes == worker.late_bytes == worker.store_bytes == MOST_STATE_BYTES
    assert worker.worker_state is WorkerState.EXITED


# ---------------------------------------------------------------- anything at all

NUMBERS = st.one_of(st.integers(0, 3), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]))
LONG = st.one_of(NUMBERS, st.sampled_from([2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**12]))
TEXT = st.one_of(st.text(st.characters(codec="utf-8"), max_size=8), st.just("\0"), st.just("x" * 70_000))
PROFILES = st.one_of(TEXT, st.just(profile_json(1)))
FLOATS = st.one_of(st.floats(), st.floats(width=32))


def messages(kind: type[Any], **fields: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


def reports_about(job_ids: list[str]) -> SearchStrategy[pb.Report]:
    about = {"job_id": st.one_of(st.sampled_from(job_ids), TEXT), "generation": st.one_of(st.just(1), LONG)}
    of = {**about, "rank": NUMBERS}
    phase = messages(pb.Phase, name=TEXT, seconds=FLOATS)
    result = messages(pb.StepResult, step=LONG, loss=FLOATS, step_us=LONG, examples=NUMBERS)
    floats32 = st.floats(width=32)
    op = messages(pb.TracedOp, op=st.integers(0, 5), micro_batch=NUMBERS, start_us=floats32, duration_us=floats32)
    one_sum = messages(pb.TracedSum, name=TEXT, start_us=floats32, duration_us=floats32)
    kinds = {
        "worker_started": messages(
            pb.WorkerStarted,
            **of,
            pid=NUMBERS,
            resumed_step=LONG,
            phases=st.lists(phase),
            kept_bytes=LONG,
            peer_bytes=LONG,
            late_bytes=LONG,
            store_bytes=LONG,
            micro_batches_redone=NUMBERS,
        ),
        "worker_exited": messages(
            pb.WorkerExited,
            **of,
            cause=st.integers(0, 9) | st.just(pb.EXIT_CAUSE_OUT_OF_MEMORY),
            exit_code=st.integers(-(2**31), 2**31 - 1),
            error_text=TEXT,
            held=messages(pb.HeldState, step=LONG, bytes=LONG, gives_only=st.booleans()),
            shortage=messages(pb.MemoryShortage, asked_bytes=LONG, free_bytes=LONG, limit_bytes=LONG),
            script_obstacle=TEXT,
        ),
        "checkpoint_committed": messages(pb.CheckpointCommitted, **about, step=LONG, url=TEXT, total_bytes=LONG),
        "preemption_notice": messages(pb.PreemptionNotice, notice_id=TEXT, seconds_left=FLOATS, source=TEXT),
        "steps_completed": messages(pb.StepsCompleted, **about, steps=st.lists(result)),
        "profile_measured": messages(
            pb.ProfileMeasured,
            **about,
            profile_json=st.one_of(TEXT, st.just(profile_json(1))),
            from_cache=st.booleans(),
        ),
        "command_refused": messages(pb.CommandRefused, **about, reason=TEXT),
        "setup_failed": messages(pb.SetupFailed, job_id=about["job_id"], error_text=TEXT),
        "step_traced": messages(
            pb.StepTraced, **of, step=LONG, begin_us=FLOATS, ops=st.lists(op), all_reduce=st.lists(one_sum)
        ),
    }
    one = [fact.map(lambda value, name=name: pb.Report(**{name: value})) for name, fact in kinds.items()]
    return st.one_of(*one, st.just(pb.Report()))


async def test_whatever_an_agent_reports_is_taken_and_harms_no_other_job(world: HostileFleet) -> None:
    before = await world.rows(world.victim)

    @settings(
        max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(batch=st.lists(reports_about([world.victim, world.own]), min_size=1, max_size=6))
    def play(batch: list[pb.Report]) -> None:
        played.append(numbered(batch))

    played: list[list[pb.Report]] = []
    play()
    for batch in played:
        await world.reports.apply_reports(OWN, batch)
    assert await world.rows(world.victim) == before
    own = await world.rows(world.own)
    json.dumps([{**row} for table in own.values() for row in table], allow_nan=False, default=str)
    assert all(metric["step"] <= MOST_STEP for metric in own["metrics"])
    async with world.database.read() as session:
        vm = await session.get_one(VmRow, OWN)
    assert vm.notice_deadline is None or math.isfinite(vm.notice_deadline)
    assert make_vm_document(vm, [], None)["notice_deadline"] is None or vm.notice_deadline <= 1e10 + MOST_SECONDS
    final = pb.WorkerExited(job_id=world.own, generation=1, cause=pb.EXIT_CAUSE_KILLED)
    await world.reports.apply_reports(OWN, [pb.Report(number=9, worker_exited=final)])
    assert (await world.worker(world.own)).worker_state is WorkerState.EXITED
