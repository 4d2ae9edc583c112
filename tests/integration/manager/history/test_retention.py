"""Finished records are deleted after their time, and nothing else is; roll-ups are the sums of their rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text

from migrated_stores import migrated, migrated_url
from rest_world import SPEC, generation, report, rest_world, vm, worker
from varuna_client import AsyncClient, NotFoundError, RefusedError
from varuna_manager.access.tokens import TokenService
from varuna_manager.agents.reports import ReportService
from varuna_manager.answers.errors import ConflictError, InvalidError, MissingError
from varuna_manager.db.engine import Database, NotLeaderError
from varuna_manager.db.job_progress import sum_up_all
from varuna_manager.db.models import (
    ArchiveRow,
    Base,
    CheckpointRow,
    EnrolmentRow,
    EventRow,
    FleetDayRow,
    GenerationRow,
    JobProgressRow,
    JobRow,
    JobVmRow,
    LoggedValueRow,
    MetricBlockRow,
    MetricRow,
    StackRow,
    TraceRow,
    VmRow,
    WorkerRow,
)
from varuna_manager.domain.access import BY_MANAGER
from varuna_manager.domain.retention import DAY_S, KeepDays
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import VmState
from varuna_manager.history.fleet_history import FleetHistoryService
from varuna_manager.history.retention import Retention
from varuna_manager.history.spending import Spending
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.jobs.jobs import JobService, read_progress
from varuna_manager.planning.planning import PlanningService
from varuna_manager.providers.local import LocalMachine, LocalProvider
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.pasts import read_past
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from waiting import DEADLINE_S

NOW = 400 * DAY_S
IDLE = ("sh", "-c", "exec sleep 600")
"""What a VM of the local provider runs here."""
KEEP = KeepDays(events=30, jobs=90, vms=30, archives=30, logs=14, tokens=7)
OF_JOB = (
    GenerationRow,
    JobProgressRow,
    JobVmRow,
    WorkerRow,
    CheckpointRow,
    MetricRow,
    MetricBlockRow,
    LoggedValueRow,
    TraceRow,
    StackRow,
)


def days_ago(days: float) -> float:
    return NOW - days * DAY_S


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.xdist_group("postgres"))])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    store = Database(migrated_url(request, tmp_path))
    yield store
    await store.close()


@pytest.fixture
def events(database: Database) -> EventLog:
    return EventLog(database, lambda: NOW)


@pytest.fixture
def jobs(database: Database, events: EventLog) -> JobService:
    return JobService(database, events, Bell(), lambda: NOW)


@pytest.fixture
async def archives(database: Database, tmp_path: Path) -> ArchiveService:
    service = ArchiveService(database, tmp_path / "archives", lambda: NOW)
    await service.remove_remains()
    return service


@pytest.fixture
def retention(database: Database, events: EventLog, archives: ArchiveService) -> Retention:
    return Retention(database, events, archives, KEEP, now=lambda: NOW)


async def add(database: Database, *rows: Any) -> None:
    async with database.write() as session:
        session.add_all([row for row in rows if isinstance(row, JobRow)])
        await session.flush()
        session.add_all([row for row in rows if not isinstance(row, JobRow)])


async def delete_all(retention: Retention) -> None:
    for _ in range(500):
        if not await retention.delete_some():
            return
    raise AssertionError("it never comes to an end")


async def count(database: Database, table: Any, *where: Any) -> int:
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(table).where(*where)) or 0


def job(name: str, state: str, finished_at: float | None = None, **changes: Any) -> JobRow:
    spec = JobSpec(**{**SPEC, "name": name}).model_dump()
    row = {"id": name, "name": name, "state": state, "spec": spec, "history": [], "created_at": 1.0, **changes}
    return JobRow(finished_at=finished_at, **row)


def event(at: float, **about: Any) -> EventRow:
    return EventRow(**{"at": at, "kind": "happened", "message": "", "data": {}, **about})


def possessions(name: str) -> list[Any]:
    """A row in every table that refers to a job."""
    return [
        generation(name, 1, 1.0, ended_at=days_ago(100), last_step=7),
        worker(name, 1, 0, f"vm-{name}"),
        JobVmRow(job_id=name, vm_id=f"vm-{name}", gpu_seconds=1.0),
        CheckpointRow(job_id=name, generation=1, step=7, url="file:///c", total_bytes=1, at=1.0),
        MetricRow(job_id=name, step=7, loss=1.0, step_s=1.0, examples=8, generation=1, at=1.0),
        MetricBlockRow(
            job_id=name, block=0, first_step=1, last_step=7, steps=1, at=1.0, generation=1, losses=0, step_s_sum=1.0,
            step_s_min=1.0, step_s_max=1.0, examples=8,
        ),
        LoggedValueRow(job_id=name, name="accuracy", step=7, value=0.5, generation=1, rank=0, at=1.0),
        TraceRow(job_id=name, generation=1, rank=0, step=7, at=NOW, begin_us=0.0, spans={}),
        StackRow(job_id=name, generation=1, rank=0, vm_id="vm", at=NOW, text="", error=""),
        event(NOW, job_id=name),
    ]  # fmt: skip


# ---------------------------------------------------------------- jobs


async def test_a_deleted_job_is_seen_by_nobody_at_once_and_then_all_of_it_goes(
    database: Database, jobs: JobService, retention: Retention
) -> None:
    rows = [job("gone", "failed", days_ago(1), idempotency_key="key"), job("kept", "succeeded", days_ago(1))]
    await add(database, *rows, *possessions("gone"), *possessions("kept"))
    await jobs.delete_job("gone")
    with pytest.raises(MissingError):
        await jobs.find_job("gone")
    with pytest.raises(MissingError):
        await jobs.retry_job("gone")
    assert [one["name"] for one in (await jobs.list_jobs(limit=10)).items] == ["kept"]
    assert await count(database, GenerationRow, GenerationRow.job_id == "gone") == 1, "its rows go later"
    again = await jobs.submit_job(JobSpec(**{**SPEC, "name": "gone"}), "key")
    assert again["id"] != "gone", "neither its name nor its key stand in the way of another"
    await delete_all(retention)
    for table in OF_JOB:
        assert await count(database, table, table.job_id == "gone") == 0, table.__tablename__
        assert await count(database, table, table.job_id == "kept") == 1, table.__tablename__
    assert await count(database, JobRow, JobRow.id == "gone") == 0
    async with database.read() as session:
        kinds = (await session.scalars(select(EventRow.kind).where(EventRow.job_id == "gone"))).all()
    assert kinds == ["job_deleted"], "the event of what was done to it comes after it"


def test_every_table_that_a_job_has_rows_in_goes_with_it() -> None:
    has_job = {mapper.class_ for mapper in Base.registry.mappers if "job_id" in mapper.columns}
    assert has_job == {*OF_JOB, EventRow}, "give a new table of jobs' rows to services.retention"


@pytest.mark.parametrize("state", ["queued", "running", "cancelling"])
async def test_a_job_that_is_not_over_is_not_deleted(database: Database, jobs: JobService, state: str) -> None:
    await add(database, job("j", state))
    with pytest.raises(ConflictError, match=f"job 'j' is {state}: only one that is over is deleted"):
        await jobs.delete_job("j")


async def test_a_job_whose_workers_may_still_run_is_not_deleted(
    database: Database, jobs: JobService, retention: Retention
) -> None:
    await add(
        database, job("j", "cancelled", days_ago(200)), generation("j", 1, 1.0), worker("j", 1, 0, "v", "running")
    )
    with pytest.raises(ConflictError, match="may still have workers on VM v"):
        await jobs.delete_job("j")
    await delete_all(retention)
    assert await count(database, JobRow) == 1


async def test_jobs_go_when_they_have_been_over_for_their_time(database: Database, retention: Retention) -> None:
    old, young, live = (
        job("old", "succeeded", days_ago(91)),
        job("young", "failed", days_ago(89)),
        job("live", "queued"),
    )
    await add(database, old, young, live, *possessions("old"), *possessions("young"))
    await delete_all(retention)
    async with database.read() as session:
        assert set(await session.scalars(select(JobRow.id))) == {"young", "live"}
        message = await session.scalar(select(EventRow.message).where(EventRow.kind == "job_deleted"))
    assert message == "job 'old' (old) was deleted after 90 days (--keep-jobs-days)"


async def test_a_large_job_goes_in_batches(database: Database, jobs: JobService, retention: Retention) -> None:
    steps = [MetricRow(job_id="j", step=n, loss=1, step_s=1, examples=8, generation=1, at=1.0) for n in range(1, 901)]
    await add(database, job("j", "succeeded", days_ago(1)), *steps)
    await jobs.delete_job("j")
    left = []
    while await retention.delete_some():
        left.append(await count(database, MetricRow))
    assert len([one for one in left if one]) >= 2, "never all at once"
    assert left[-1] == await count(database, JobRow) == 0


async def test_late_reports_of_a_deleted_job_do_no_harm(
    database: Database, jobs: JobService, events: EventLog, retention: Retention
) -> None:
    await add(database, job("j", "cancelled", days_ago(1)), *possessions("j"))
    await jobs.delete_job("j")
    reports = ReportService(database, events, PlanningService(), Bell(), lambda: NOW)
    await reports.apply_reports("vm-j", [report("j", 1, range(8, 10), 1.0)])
    await delete_all(retention)
    await reports.apply_reports("vm-j", [report("j", 1, range(10, 12), 1.0)])
    assert await count(database, MetricRow) == await count(database, JobRow) == 0


async def test_a_manager_that_no_longer_leads_deletes_nothing(database: Database, tmp_path: Path) -> None:
    await add(database, event(1.0), event(NOW))

    async def refuse(session: Any) -> None:
        raise NotLeaderError("another one leads")

    fenced = Database(database.url, fence=refuse)
    former = Retention(fenced, EventLog(fenced), ArchiveService(fenced, tmp_path), KEEP, now=lambda: NOW)
    with pytest.raises(NotLeaderError):
        await former.delete_some()
    await fenced.close()
    assert await count(database, EventRow) == 2


async def test_delete_by_rest_and_by_the_client(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world, AsyncClient(world.url, timeout_s=DEADLINE_S) as client:
        await add(world.database, job("over", "failed", 1.0), job("live", "running"))
        with pytest.raises(RefusedError, match="job 'live' is running: only one that is over is deleted"):
            await client.delete("live")
        assert await client.delete("over") == {"id": "over", "name": "over", "deleted": True}
        assert await client.delete("over") == {"id": "over", "name": "over", "deleted": True}, "its answer was lost"
        for call in (client.job("over"), client.retry("over"), client.delete("never was")):
            with pytest.raises(NotFoundError):
                await call
        assert [one["id"] for one in await client.jobs()] == ["live"]
        audited = await world.ask("GET", "/api/v1/audit")
        assert ("DELETE /api/v1/jobs/live", 409) in [(one["action"], one["status"]) for one in audited.json()]


async def test_a_kind_that_cannot_be_deleted_does_not_keep_the_others(database: Database, retention: Retention) -> None:
    """The rows of a job that another table, of a later version, still points to."""
    await add(database, job("j", "failed", days_ago(100)), *possessions("j"), event(days_ago(31)), event(NOW))
    async with database.write() as session:
        await session.execute(text("CREATE TABLE later (job_id VARCHAR(255) REFERENCES jobs (id))"))
        await session.execute(text("INSERT INTO later VALUES ('j')"))
    await delete_all(retention)
    assert await count(database, JobRow) == 1
    assert await count(database, EventRow, EventRow.at < days_ago(30)) == 0
    async with database.write() as session:
        await session.execute(text("DROP TABLE later"))
    await delete_all(retention)
    assert await count(database, JobRow) == 0


# ---------------------------------------------------------------- events, details


async def test_old_events_go_and_the_newest_never(database: Database, retention: Retention) -> None:
    await add(database, *(event(days_ago(31) + n) for n in range(700)))
    async with database.read() as session:
        newest = await session.scalar(select(func.max(EventRow.id)))
    await delete_all(retention)
    async with database.read() as session:
        assert (await session.scalars(select(EventRow.id))).all() == [newest]
    await add(database, event(NOW))
    async with database.read() as session:
        following = await session.scalar(select(func.max(EventRow.id)))
    assert following is not None
    assert newest is not None
    assert following > newest, "followers of the events get it"


async def test_zero_days_keep_everything(database: Database, events: EventLog, archives: ArchiveService) -> None:
    never = KeepDays(events=0, jobs=0, vms=0, archives=0, logs=0, tokens=0)
    await add(
        database, job("j", "failed", 1.0), *possessions("j"), vm("v", 1.0, "gone", gone_at=2.0), event(1.0), event(2.0)
    )
    retention = Retention(database, events, archives, never, now=lambda: NOW)
    assert not await retention.delete_some()


async def test_details_of_old_generations_go_and_what_they_did_stays(
    database: Database, retention: Retention, jobs: JobService
) -> None:
    past = [{"at": 1.0, "state": "exited", "reason": "r"}]
    rows: list[Base] = [job("j", "running", started_at=1.0)]
    for number, days in ((1, 15.0), (2, 13.0), (3, None)):
        ended_at = None if days is None else days_ago(days)
        row = generation("j", number, 1.0, state="running" if days is None else "ended", ended_at=ended_at, last_step=5)
        one = worker("j", number, 0, "v", "running" if days is None else "exited")
        one.history = past
        trace = TraceRow(job_id="j", generation=number, rank=0, step=1, at=days_ago(days or 0), begin_us=0.0, spans={})
        rows += [row, one, trace]
    await add(database, *rows)
    await delete_all(retention)
    await delete_all(retention)
    async with database.read() as session:
        kept = await session.execute(
            select(GenerationRow.number, GenerationRow.candidates).order_by(GenerationRow.number)
        )
        assert [(number, bool(candidates)) for number, candidates in kept] == [(1, False), (2, True), (3, True)]
        histories = await session.execute(
            select(WorkerRow.generation, WorkerRow.history).order_by(WorkerRow.generation)
        )
        assert [(number, bool(history)) for number, history in histories] == [(1, False), (2, True), (3, True)]
        assert (await session.scalars(select(TraceRow.generation).order_by(TraceRow.generation))).all() == [2, 3]
    assert (await jobs.find_job("j"))["step"] == 5


# ---------------------------------------------------------------- VMs


async def test_vms_go_when_no_job_names_them_and_what_the_fleet_cost_stays(
    database: Database, retention: Retention
) -> None:
    lives = {
        "old": (days_ago(40), days_ago(35.5)),
        "named": (days_ago(60), days_ago(50)),
        "young": (days_ago(20), days_ago(2)),
    }
    rows: list[Base] = [
        vm(name, created_at, "gone", gone_at=gone_at, gpus=2, price_per_hour=None if name == "young" else 1.5)
        for name, (created_at, gone_at) in lives.items()
    ]
    rows += [vm("there", days_ago(50), "ready", price_per_hour=2.0)]
    rows += [
        job("j", "succeeded", days_ago(45)),
        generation("j", 1, days_ago(55), ended_at=days_ago(51)),
        worker("j", 1, 0, "named"),
    ]
    rows += [EnrolmentRow(vm_id=name, enrolment="e", token_id="t", key_sha256="", joined_at=1.0) for name in lives]
    await add(database, *rows)
    past, spending = FleetHistoryService(database, KEEP, lambda: NOW), Spending(database, lambda: NOW)
    whole, since = await past.read_cost(None), await past.read_cost(days_ago(37))
    of_job = await spending.read_cost("j")
    await delete_all(retention)
    async with database.read() as session:
        assert set(await session.scalars(select(VmRow.id))) == {"named", "young", "there"}
        assert set(await session.scalars(select(EnrolmentRow.vm_id))) == {"named", "young"}
    assert await past.read_cost(None) == pytest.approx(whole)
    assert await past.read_cost(days_ago(37)) == pytest.approx(since)
    assert await spending.read_cost("j") == of_job
    async with database.write() as session:
        row = await session.get_one(JobRow, "j")
        row.deleted_at = NOW
    await delete_all(retention)
    await delete_all(retention)
    assert await count(database, VmRow, VmRow.id == "named") == 0, "it goes with its job"
    assert await past.read_cost(None) == pytest.approx(whole)
    assert await count(database, FleetDayRow) > 0


async def test_a_vm_notes_when_it_goes(database: Database) -> None:
    await add(database, vm("v", 1.0))
    async with database.write() as session:
        (await session.get_one(VmRow, "v")).move_to_state(VmState.GONE, now=5.0, reason="test")
    async with database.read() as session:
        assert (await session.get_one(VmRow, "v")).gone_at == 5.0


async def test_folders_of_local_vms_go_with_their_logs(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    database = Database(f"sqlite:///{tmp_path / 'manager.db'}")
    provider = LocalProvider(tmp_path, "127.0.0.1:1", LocalMachine(agent_command=IDLE), None)
    try:
        made = (await provider.create(4, "request")).vms
        ids = [one.id for one in made]
        await provider.delete(ids[:3])
        gone = {ids[0]: days_ago(15), ids[1]: days_ago(13)}
        await add(database, *(vm(name, 1.0, "gone", gone_at=at) for name, at in gone.items()))
        for name in ids:  # the third and the fourth are not known to the store; the fourth runs
            os.utime(tmp_path / "vms" / name / "agent.log", (days_ago(20), days_ago(20)))
        events, archives = EventLog(database), ArchiveService(database, tmp_path / "archives")
        await delete_all(Retention(database, events, archives, KEEP, provider, now=lambda: NOW))
        assert {path.name for path in (tmp_path / "vms").iterdir()} == {ids[1], ids[3]}
    finally:
        await provider.close(end_vms=True)
        await database.close()


# ---------------------------------------------------------------- archives, tokens


async def store(archives: ArchiveService, data: bytes) -> str:
    async def body() -> AsyncIterator[bytes]:
        yield data

    sha256 = hashlib.sha256(data).hexdigest()
    await archives.receive_archive(sha256, body())
    return sha256


async def content(archives: ArchiveService, sha256: str) -> bytes:
    return b"".join([chunk async for chunk in archives.read_archive(sha256)])


async def test_archives_go_when_all_jobs_that_name_them_are_long_over(
    database: Database, jobs: JobService, retention: Retention, archives: ArchiveService
) -> None:
    large = b"a" * 6 * 1024 * 1024
    old, young, shared, unnamed = [await store(archives, data) for data in (large, b"b", b"c", b"d")]
    await add(
        database,
        job("old", "failed", days_ago(31), archive=old),
        job("young", "failed", days_ago(29), archive=young),
        job("over", "failed", days_ago(31), archive=shared),
        job("live", "running", archive=shared),
    )
    await delete_all(retention)
    async with database.read() as session:
        assert set(await session.scalars(select(ArchiveRow.sha256))) == {young, shared, unnamed}
    with pytest.raises(MissingError):
        await content(archives, old)
    assert [await content(archives, one) for one in (young, shared, unnamed)] == [b"b", b"c", b"d"]
    with pytest.raises(ConflictError, match="the workdir of job 'old' is no longer kept"):
        await jobs.retry_job("old")
    with pytest.raises(InvalidError, match="upload it"):
        await jobs.submit_job(JobSpec(**{**SPEC, "name": "new", "archive": old}), None)
    await store(archives, large)
    assert await content(archives, old) == large, "it can be uploaded again"
    assert (await jobs.retry_job("old"))["state"] == "queued"


async def test_an_archive_that_a_job_names_meanwhile_stays(archives: ArchiveService) -> None:
    sha256 = await store(archives, b"0123456789")
    assert not await archives.delete_archive(sha256, only_if=ArchiveRow.total_bytes > 10)
    assert await archives.read_size(sha256) == 10


async def test_tokens_go_that_open_nothing_any_more(database: Database, retention: Retention) -> None:
    tokens = TokenService(database, "pin", lambda: days_ago(10))
    made = {}
    for name in ("used", "expired", "revoked", "unused", "lasts"):
        ttl_s = {"expired": DAY_S, "unused": 5 * DAY_S}.get(name, 100 * DAY_S)
        single = name == "used"
        made[name] = await tokens.create_join_token(name, ttl_s, single_use=single, vm_id=None, by="test")
    async with database.write() as session:
        tokens.use_join_token(await tokens.find_join_token(session, made["used"]["token"]))
        tokens.use_join_token(await tokens.find_join_token(session, made["lasts"]["token"]))
    await tokens.revoke_token("revoked")
    await delete_all(retention)
    assert {one["name"] for one in await tokens.list_tokens()} == {"unused", "lasts"}


async def test_tokens_of_vms_that_were_never_made_go_when_they_expire(database: Database, retention: Retention) -> None:
    for made_at, age in ((NOW - 7200.0, "old"), (NOW - 60.0, "new")):
        tokens = TokenService(database, "pin", lambda at=made_at: at)
        for user in (BY_MANAGER, "admin"):
            await tokens.create_join_token(f"{age} of {user}", 3600.0, single_use=True, vm_id="v", by=user)
        joined = await tokens.create_join_token(f"{age}, joined", 3600.0, single_use=True, vm_id="v", by=BY_MANAGER)
        async with database.write() as session:
            tokens.use_join_token(await tokens.find_join_token(session, joined["token"]))
    await delete_all(retention)
    left = {one["name"] for one in await tokens.list_tokens()}
    assert left == {"old of admin", "old, joined", f"new of {BY_MANAGER}", "new of admin", "new, joined"}


# ---------------------------------------------------------------- roll-ups


async def test_what_a_jobs_generations_come_to_is_kept_true(
    database: Database, jobs: JobService, events: EventLog
) -> None:
    """Reports through the real service, a generation after the other, late reports included."""
    await add(database, job("j", "running", started_at=50.0))
    reports = ReportService(database, events, PlanningService(), Bell(), lambda: NOW)
    world, seen = World(database, VmRegistry()), []
    await world.load_view()
    script = [(1, range(1, 6)), (2, range(4, 9)), (1, range(6, 8)), (3, range(9, 10))]
    for place, (number, steps) in enumerate(script):
        if number not in {before for before, _ in script[:place]}:
            if number > 1:
                async with database.write() as session:
                    query = select(GenerationRow).where(GenerationRow.number == number - 1)
                    before = (await session.scalars(query)).one()
                    before.state, before.ended_at, before.end_cause = "ended", 100.0 + number, "hang"
            row = generation("j", number, 60.0 + number, state="running")
            await add(database, row, worker("j", number, 0, "v", "running"))
        await reports.apply_reports("v", [report("j", number, steps, 1.0)])
        seen.append((await world.load_view()).find_past("j").setbacks)
        async with database.read() as session:
            anew = (await read_past(session, "j", None)).setbacks
            assert seen[-1] == anew, "what is remembered is what is in the store"
    assert [past.best_step for past in seen] == [0, 5, 7, 8], "a late report of an ended generation is seen"
    columns = [column.name for column in JobProgressRow.__table__.columns if column.name != "changes"]
    async with database.write() as session:
        row = await session.get_one(JobProgressRow, "j")
        kept_values = {name: getattr(row, name) for name in columns}
        session.expunge_all()
        await sum_up_all(session)
        anew_row = await session.get_one(JobProgressRow, "j")
        assert {name: getattr(anew_row, name) for name in columns} == kept_values
    assert kept_values["step"] == 9
    assert kept_values["newest"] == kept_values["stepped"] == kept_values["trained"] == 3
    async with database.read() as session:
        progress = (await read_progress(session, ["j"]))["j"]
    assert (progress.step, progress.generation) == (9, 3)


async def test_a_look_does_not_add_up_generations(database: Database) -> None:
    """The query plans of a look: none goes through all generations of a job."""
    from varuna_manager.world import reading

    if database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL chooses by its statistics")
    keys = [("j", 1), ("k", 2)]
    workers = reading.at_generations(reading._WORKERS, WorkerRow.job_id, WorkerRow.generation, keys)
    generations = reading.at_generations(reading._GENERATIONS, GenerationRow.job_id, GenerationRow.number, keys)
    looks = [reading.NEWEST_OF_LIVE, reading.ALIVE_GENERATIONS, generations, workers, reading._VMS]
    async with database.read() as session:
        for query in looks:
            compiled = query.compile(database.engine, compile_kwargs={"literal_binds": True})
            plan = [row.detail for row in await session.execute(text(f"EXPLAIN QUERY PLAN {compiled}"))]
            scans = [line for line in plan if line.startswith("SCAN") and not line.startswith("SCAN job")]
            assert not scans, f"{compiled}\n{plan}"
            if query is generations or query is workers:
                found = [line for line in plan if line.startswith(("SEARCH workers", "SEARCH generations"))]
                assert found, plan
                assert all("number=?" in line or "generation=?" in line for line in found), plan
