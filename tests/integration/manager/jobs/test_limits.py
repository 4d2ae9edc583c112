"""A job's limits and labels in the store: what counts against a limit, and which jobs a label finds."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from migrated_stores import migrated
from rest_world import SPEC, generation, rest_world, vm, worker
from scripted_manager import ScriptedManager, start_training
from varuna_client.commands.reading import list_jobs
from varuna_manager.answers.errors import InvalidError
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow, VmRow
from varuna_manager.domain.limits import JobLimitsView, find_reached_limit
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import JobState
from varuna_manager.history.spending import Spending
from varuna_manager.jobs.jobs import JobService
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from varuna_proto.v1 import agent_pb2 as pb

pytestmark = pytest.mark.xdist_group("postgres")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def jobs(database: Database, clock: Clock) -> JobService:
    return JobService(database, EventLog(database, clock), Bell(), clock)


def spec(**changes: object) -> JobSpec:
    return JobSpec.model_validate({**SPEC, **changes})


async def add(database: Database, *rows: object) -> None:
    async with database.write() as session:
        for row in rows:
            session.add(row)
            await session.flush()


async def test_the_cost_that_counts_is_what_the_job_is_said_to_cost(
    database: Database, jobs: JobService, clock: Clock
) -> None:
    job_id = (await jobs.submit_job(spec(limits={"max_cost": 9.0}), None))["id"]
    loader = SnapshotLoader(database, World(database, VmRegistry(clock), clock), Rules(), clock)

    async def limits() -> JobLimitsView:
        (job,) = (await loader.load_snapshot()).jobs
        cost = (await Spending(database, clock).read_cost(job_id))["cost"] or 0.0
        assert job.view.limits.cost == pytest.approx(cost)
        return job.view.limits

    assert (await limits()).cost == 0.0
    await add(
        database,
        vm("a", gpus=2, price_per_hour=4.0),
        vm("b", price_per_hour=1.0),
        vm("c"),
        generation(job_id, 1, 1000.0, state="running"),
        worker(job_id, 1, 0, "a", "running"),
        worker(job_id, 1, 1, "b", "running"),
        worker(job_id, 1, 2, "c", "running"),
    )
    clock.now += 3600.0
    assert (await limits()).cost == pytest.approx(4.0 / 2 + 1.0), "half of one VM, and one whose price is not known"
    clock.now += 3600.0
    found = await limits()
    assert found.cost == pytest.approx(6.0)
    assert find_reached_limit(clock.now, JobState.RUNNING, JobLimitsView(max_cost=6.0, run_since=0.0, cost=found.cost))
    async with database.write() as session:
        row = (await session.scalars(select(GenerationRow).where(GenerationRow.job_id == job_id))).one()
        row.state, row.ended_at = "ended", clock.now
    clock.now += 3600.0
    assert (await limits()).cost == pytest.approx(6.0), "what has ended costs no more"


async def test_a_price_that_is_known_later_counts_at_once(database: Database, jobs: JobService, clock: Clock) -> None:
    job_id = (await jobs.submit_job(spec(limits={"max_cost": 9.0}), None))["id"]
    loader = SnapshotLoader(database, World(database, VmRegistry(clock), clock), Rules(), clock)

    async def cost() -> float:
        (job,) = (await loader.load_snapshot()).jobs
        return job.view.limits.cost

    running = generation(job_id, 1, 1000.0, state="running"), worker(job_id, 1, 0, "a", "running")
    await add(database, vm("a"), *running)
    assert await cost() == 0.0
    async with database.write() as session:
        (await session.get_one(VmRow, "a")).price_per_hour = 3.0
    clock.now += 3600.0
    assert await cost() == pytest.approx(3.0)
    clock.now += 3600.0
    assert await cost() == pytest.approx(6.0)


async def test_a_retry_begins_every_limit_again(database: Database, jobs: JobService, clock: Clock) -> None:
    given = {"max_cost": 1.0, "max_duration_s": 60.0, "queue_timeout_s": 60.0}
    job_id = (await jobs.submit_job(spec(limits=given), None))["id"]
    await add(
        database,
        vm("a", price_per_hour=10.0),
        generation(job_id, 1, 1000.0, ended_at=4600.0),
        worker(job_id, 1, 0, "a"),
    )
    async with database.write() as session:
        job = await session.get_one(JobRow, job_id)
        job.run_since = 1000.0
        job.move_to_state(JobState.RUNNING, now=1000.0, reason="test")
    clock.now = 4600.0
    loader = SnapshotLoader(database, World(database, VmRegistry(clock), clock), Rules(), clock)
    (loaded,) = (await loader.load_snapshot()).jobs
    assert loaded.view.limits == JobLimitsView(**given, waits_since=1000.0, run_since=1000.0, cost=pytest.approx(10.0))
    async with database.write() as session:
        job = await session.get_one(JobRow, job_id)
        job.move_to_state(JobState.FAILED, now=4600.0, reason="over its limit")
        job.active_name = None
    clock.now = 5000.0
    await jobs.retry_job(job_id)
    (loaded,) = (await loader.load_snapshot()).jobs
    assert loaded.view.limits == JobLimitsView(**given, waits_since=5000.0)
    assert not find_reached_limit(clock.now, loaded.view.state, loaded.view.limits)


async def test_jobs_are_found_by_their_labels(database: Database, jobs: JobService) -> None:
    for name, labels in {
        "a": {"team": "vision", "app.io/part-of": "x"},
        "b": {"team": "vision", "urgent": ""},
        "c": {"team": "language"},
        "d": {},
    }.items():
        await jobs.submit_job(spec(name=name, labels=labels), None)
    async with database.write() as session:  # as an earlier version stored it
        old = await session.get_one(JobRow, (await jobs.find_job("d"))["id"])
        old.spec = {key: value for key, value in old.spec.items() if key not in ("labels", "limits")}

    async def found(*labels: str) -> set[str]:
        return {job["name"] for job in (await jobs.list_jobs(labels=labels, limit=10)).items}

    assert await found() == {"a", "b", "c", "d"}
    assert await found("team=vision") == {"a", "b"}
    assert await found("team=vision", "urgent") == {"b"}
    assert await found("team") == {"a", "b", "c"}
    assert await found("urgent=") == {"b"}
    assert await found("app.io/part-of=x") == {"a"}
    assert await found("team=vis%") == set()
    with pytest.raises(InvalidError, match="expected KEY=VALUE, or KEY"):
        await found('a"b=c')


async def test_labels_are_a_filter_of_rest_and_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        for name, labels in {"a": {"team": "vision", "x": "1"}, "b": {"team": "vision"}, "c": {}}.items():
            await world.ask("POST", "/api/v1/jobs", json={**SPEC, "name": name, "labels": labels})
        url = "/api/v1/jobs?label=team%3Dvision&label=x&limit=1"
        assert [job["name"] for job in (await world.ask("GET", url)).json()] == ["a"]
        refused = await world.ask("GET", "/api/v1/jobs?label=a%22b")
        assert refused.status_code == 422
        assert "expected KEY=VALUE, or KEY" in refused.json()["detail"]
        monkeypatch.setenv("VARUNA_MANAGER_URL", world.url)
        capsys.readouterr()  # the log of what was submitted
        await asyncio.to_thread(partial(list_jobs, label=["team=vision"], as_json=True))
        assert [job["name"] for job in json.loads(capsys.readouterr().out)] == ["b", "a"]


@pytest.mark.slow
async def test_a_manager_saves_and_ends_a_job_over_its_limit(manager: ScriptedManager) -> None:
    ((agent, launch),) = await start_training(manager, 1, job={"limits": {"max_duration_s": 86_400}})
    manager.kill()
    await agent.close()
    agent.running = [pb.RunningWorker(job_id=launch.job_id, generation=2, rank=0, step=3)]
    with closing(sqlite3.connect(manager.data_dir / "manager.db", timeout=30)) as store, store:  # a day later
        store.execute("UPDATE jobs SET run_since = run_since - 90000, version = version + 1")
    await manager.start()
    await agent.connect()
    assert (await agent.stop(2)).mode == pb.STOP_MODE_SAVE_FIRST
    agent.exited(launch, pb.EXIT_CAUSE_GENERATION_ENDED)
    failed = await manager.job_in("failed")
    assert "limits.max_duration_s 86400" in failed["error"]
    generation = (await manager.get("jobs/train/generations"))[-1]
    assert (generation["number"], generation["end_cause"]) == (2, "limit")
    assert (await manager.rest.post("jobs/train/retry")).status_code == 200
    assert (await agent.launch(3)).generation == 3
