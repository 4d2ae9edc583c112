"""Whatever spec is in the store, the other jobs go on: through the controller, the messages to agents and the lists.

The store's rows are real, and so are the controllers and services; the agents are their sessions, which are read here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from controller_world import controller_over
from migrated_stores import migrated
from rest_world import SPEC, RestWorld, rest_world, vm
from varuna_manager.agents.sessions import AgentSessions
from varuna_manager.controllers.job_controller import JobController
from varuna_manager.db.models import JobRow
from varuna_manager.domain.spec import JobSpec
from varuna_manager.fleet.fleet import job_wants
from varuna_manager.providers.base import VmOffer
from varuna_manager.world import world as world_module
from varuna_proto.v1 import agent_pb2 as pb

GOOD = {**SPEC, "name": "good", "resources": {"min_gpus": 1, "max_gpus": 1}, "env": {"SECRET": "of-good"}}
VMS = ("vm-0", "vm-1", "vm-2")


@dataclass
class Fleet:
    """A controller over the store of a REST world, and three idle VMs."""

    world: RestWorld
    controller: JobController
    sessions: AgentSessions

    async def look(self) -> None:
        """Runs until nothing changes."""
        for _ in range(30):
            if await self.controller.reconcile_once() > 0:
                return
        pytest.fail("the controller never comes to rest")

    async def sent(self, kind: str) -> list[tuple[str, Any]]:
        """All commands of this kind that wait for the agents: (VM, message)."""
        found = []
        for session in self.sessions.list_sessions():
            session.acknowledge(heartbeat=1)  # so that the last message is not waited for
            while (message := await session.next_message()) is not None and message.WhichOneof("body") != "ack":
                if message.WhichOneof("body") == kind:
                    found.append((session.vm_id, getattr(message, kind)))
        return found

    async def state(self, job_id: str) -> JobRow:
        async with self.world.database.read() as session:
            return await session.get_one(JobRow, job_id)


@asynccontextmanager
async def fleet_over(world: RestWorld, folder: Path) -> AsyncIterator[Fleet]:
    await world.add(*(vm(vm_id) for vm_id in VMS))
    async with controller_over(world, VMS, checkpoint_root=f"file://{folder}/checkpoints") as over:
        yield Fleet(world, over.controller, over.sessions)


def row(job_id: str, spec: Any, created_at: float = 1.0) -> JobRow:
    name = f"name-{job_id}"
    return JobRow(id=job_id, name=name, active_name=name, spec=spec, state="queued", history=[], created_at=created_at)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as world:
        yield world


BAD = {
    "a batch that fits no message": {**SPEC, "global_batch": 5_000_000_000},
    "half a character in a variable's name": {**SPEC, "env": {"\ud800": "1"}},
    "half a character in a variable": {**SPEC, "env": {"A": "\udfff"}},
    "a NUL in the command": {**SPEC, "run": "true\0"},
    "a variable that no process can have": {**SPEC, "env": {"A=B": "1"}},
    "more GPUs than are counted": {**SPEC, "resources": {"min_gpus": 2**70, "max_gpus": None}},
    "a setting of a later version": {**SPEC, "color": "red"},
    "nothing": {},
    "no spec": [1, 2],
    "no number": {**SPEC, "checkpoint": {"url": None, "interval_s": float("nan")}},
}


async def test_a_stored_spec_that_cannot_be_used_fails_its_own_job_only(world: RestWorld, tmp_path: Path) -> None:
    bad = {f"job-{number}": spec for number, spec in enumerate(BAD.values())}
    await world.add(*(row(job_id, spec) for job_id, spec in bad.items()), row("job-good", GOOD, created_at=2.0))
    async with fleet_over(world, tmp_path) as fleet:
        async with world.database.read() as session:
            wants, unfit = await job_wants(session, [VmOffer(gpus=1)])
            assert ([one.id for one in wants], unfit) == (["job-good"], 0)
        await fleet.look()
        assert [message.job_id for _, message in await fleet.sent("launch")] == ["job-good"]
        for job_id in bad:
            job = await fleet.state(job_id)
            assert (job.state, job.active_name) == ("failed", None)
            assert job.error is not None
            assert job.error.startswith("its stored spec is invalid: ")
    for path in ("/api/v1/jobs", "/api/v1/events", *(f"/api/v1/jobs/{job_id}" for job_id in bad)):
        response = await world.ask("GET", path)
        assert response.status_code == 200, response.text
    assert {job["id"] for job in (await world.ask("GET", "/api/v1/jobs")).json()} == {*bad, "job-good"}


async def test_a_job_that_runs_and_whose_spec_cannot_be_used_any_more_is_stopped_first(
    world: RestWorld, tmp_path: Path
) -> None:
    await world.add(row("job-a", {**GOOD, "name": "a"}), row("job-good", GOOD, created_at=2.0))
    async with fleet_over(world, tmp_path) as fleet:
        await fleet.look()
        assert {message.job_id for _, message in await fleet.sent("launch")} == {"job-a", "job-good"}
        await world.change("job-a", spec={**SPEC, "global_batch": 5_000_000_000})
        await fleet.look()
        stops = await fleet.sent("stop")
        assert [message.job_id for _, message in stops] == ["job-a"]
        exited = pb.WorkerExited(job_id="job-a", generation=1, cause=pb.EXIT_CAUSE_GENERATION_ENDED)
        await world.reports.apply_reports(stops[0][0], [pb.Report(number=1, worker_exited=exited)])
        await fleet.look()
        assert (await fleet.state("job-a")).state == "failed"
        assert (await fleet.state("job-good")).state == "running"


async def test_a_message_that_cannot_be_made_fails_its_own_job_only(
    world: RestWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec that passes the bounds and still fits no message."""
    loose = JobSpec.model_construct(**{**JobSpec(**{**GOOD, "name": "bad"}).__dict__, "global_batch": 5_000_000_000})
    strict = world_module.read_spec
    monkeypatch.setattr(world_module, "read_spec", lambda spec: (loose, "") if spec == {"bad": 1} else strict(spec))
    await world.add(row("job-bad", {"bad": 1}), row("job-good", GOOD, created_at=2.0))
    async with fleet_over(world, tmp_path) as fleet:
        await fleet.look()
        assert [message.job_id for _, message in await fleet.sent("launch")] == ["job-good"]
        await fleet.look()
        ((vm_id, stop),) = await fleet.sent("stop")
        assert stop.job_id == "job-bad"
        refused = pb.CommandRefused(job_id="job-bad", generation=1, reason="nothing of it runs")
        await world.reports.apply_reports(vm_id, [pb.Report(number=1, command_refused=refused)])
        await fleet.look()
        bad = await fleet.state("job-bad")
        assert bad.state == "failed"
        assert bad.error is not None
        assert "its commands cannot be sent to its agents" in bad.error


UNFIT: list[dict[str, Any]] = [
    {"global_batch": 5_000_000_000},
    {"env": {"\ud800": "1"}},
    {"env": {"A": "\ud800"}},
    {"env": {"A": "x\0"}},
    {"env": {"A B": "x"}},
    {"run": "\0"},
    {"setup": "\ud800"},
    {"checkpoint": {"url": "file:///\udcff"}},
    {"steps": 10**12},
    {"\ud800": 1},
    {"plan": {"p": 2**20, "d": 2**20}},
    {"resources": {"min_gpus": 10**9}},
    {"env": {f"A{number}": "x" * 90_000 for number in range(6)}},
]


async def test_what_cannot_be_launched_is_not_taken(world: RestWorld) -> None:
    for changes in UNFIT:
        body = json.dumps({**SPEC, **changes})
        response = await world.ask("POST", "/api/v1/jobs", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 422, (changes, response.text)
        assert len(response.text) < 2000
    assert (await world.ask("GET", "/api/v1/jobs")).json() == []


# ---------------------------------------------------------------- anything at all

TEXT = st.one_of(st.text(max_size=6), st.sampled_from(["\0", "\ud800", "/w", "python train.py", "x" * 100_000]))
NUMBERS = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**20, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 5_000_000_000]), st.none()
)
FLOATS = st.one_of(st.floats(), st.none())
ANY = st.recursive(st.one_of(TEXT, NUMBERS, FLOATS, st.booleans()), lambda inner: st.lists(inner, max_size=2))


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


SPECS = some(
    workdir=TEXT,
    run=TEXT,
    setup=TEXT,
    global_batch=NUMBERS,
    steps=NUMBERS,
    resources=some(min_gpus=NUMBERS, max_gpus=NUMBERS),
    checkpoint=some(url=TEXT, interval_s=FLOATS),
    env=st.dictionaries(TEXT, TEXT, max_size=3),
    plan=some(p=NUMBERS, d=NUMBERS, micro_batch=NUMBERS),
    profile_only=st.booleans(),
    max_restarts_on_errors=NUMBERS,
    priority=NUMBERS,
).map(lambda changes: {**SPEC, **changes}) | st.dictionaries(st.sampled_from(list(JobSpec.model_fields)), ANY)


async def test_whatever_is_stored_the_other_jobs_are_launched(world: RestWorld, tmp_path: Path) -> None:
    specs: list[Any] = []

    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(spec=SPECS)
    def play(spec: Any) -> None:
        specs.append(spec)

    play()
    rows = [row(f"job-{number}", spec, created_at=float(number)) for number, spec in enumerate(specs)]
    # With the highest priority: then it has a GPU, however many of the others are sound.
    await world.add(*rows, row("job-good", {**GOOD, "priority": 100}, created_at=1000.0))
    async with fleet_over(world, tmp_path) as fleet:
        await fleet.look()
        launched = {message.job_id for _, message in await fleet.sent("launch")}
        assert "job-good" in launched
        for number, spec in enumerate(specs):
            job = await fleet.state(f"job-{number}")
            assert (job.state == "failed") == (not is_sound(spec)), (spec, job.reason)
            assert job.state == "failed" or job.id in launched or job.reason, spec
    response = await world.ask("GET", "/api/v1/jobs")
    assert response.status_code == 200, response.text
    assert len(response.json()) == len(specs) + 1


def is_sound(spec: Any) -> bool:
    try:
        JobSpec.model_validate(spec)
    except ValidationError:
        return False
    return True
