"""Cancel, retry, drain and stacks in the store: idempotent, with one clear line for what makes no sense."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select

from migrated_stores import migrated
from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.answers.errors import ConflictError, MissingError
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.db.engine import Database
from varuna_manager.db.models import EventRow, GenerationRow, JobRow, VmRow
from varuna_manager.domain.fleet_decision import decide_vm
from varuna_manager.domain.observed import Rules, VmView
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import JobState, VmState
from varuna_manager.fleet.drains import DrainService
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.jobs.jobs import JobService
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.providers.base import Provider
from varuna_manager.providers.local import LocalMachine, LocalProvider
from varuna_manager.providers.static import StaticHost, StaticProvider
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.reading import read_vms
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb

SPEC = JobSpec(name="train", workdir="/w", run="true", global_batch=8)
NOW = 100.0


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    migrated(tmp_path / "manager.db")
    store = Database(f"sqlite:///{tmp_path / 'manager.db'}")
    yield store
    await store.close()


@pytest.fixture
def jobs(database: Database) -> JobService:
    return JobService(database, EventLog(database, lambda: NOW), Bell(), lambda: NOW)


async def end(database: Database, job_id: str, *states: JobState, error: str | None = None) -> None:
    """As the controller does when it finishes a job."""
    async with database.write() as session:
        job = await session.get_one(JobRow, job_id)
        for state in states:
            job.move_to_state(state, now=NOW, reason="test")
        job.error, job.finished_at, job.active_name = error, NOW, None
        job.exit_code = 3 if error else None


async def add_failed_generation(database: Database, job_id: str, number: int) -> None:
    async with database.write() as session:
        session.add(
            GenerationRow(
                job_id=job_id,
                number=number,
                kind="training",
                state="ended",
                history=[],
                plan=Plan(p=1, d=1, micro_batch=1, global_batch=8).to_document(),
                candidates=[],
                rendezvous_host="h",
                rendezvous_port=1,
                reason="test",
                created_at=50.0,
                ended_at=60.0 + number,
                end_cause="script_failed",
                end_reason="the script failed",
                last_step=4,
            )
        )


async def kinds(database: Database) -> list[str]:
    async with database.read() as session:
        return list((await session.scalars(select(EventRow.kind).order_by(EventRow.id))).all())


# ---------------------------------------------------------------- retry


async def test_a_job_that_failed_is_retried_as_itself_with_a_clean_slate(database: Database, jobs: JobService) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    for number in (1, 2):
        await add_failed_generation(database, job_id, number)
    loader = SnapshotLoader(database, World(database, VmRegistry()), Rules())
    (loaded,) = (await loader.load_snapshot()).jobs
    assert (loaded.view.setbacks.errors, loaded.view.setbacks.best_step) == (2, 4)
    await end(database, job_id, JobState.RUNNING, JobState.FAILED, error="ValueError: x")
    assert (await jobs.find_job(job_id))["exit_code"] == 3

    retried = await jobs.retry_job("train")
    assert (retried["id"], retried["state"], retried["error"], retried["exit_code"]) == (job_id, "queued", None, None)
    assert await jobs.retry_job(job_id) == retried, "asked again, it is the same"
    assert (await kinds(database)).count("job_retried") == 1
    (loaded,) = (await loader.load_snapshot()).jobs
    assert (loaded.view.setbacks.errors, loaded.view.setbacks.best_step) == (0, 4)
    with pytest.raises(ConflictError, match="already queued"):
        await jobs.submit_job(SPEC, None)


async def test_only_what_failed_or_was_cancelled_is_retried(database: Database, jobs: JobService) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    with pytest.raises(ConflictError, match="is queued: only one that failed or was cancelled is retried"):
        await jobs.retry_job(job_id)
    await end(database, job_id, JobState.RUNNING, JobState.SUCCEEDED)
    with pytest.raises(ConflictError, match="is succeeded"):
        await jobs.retry_job(job_id)
    with pytest.raises(MissingError):
        await jobs.retry_job("nobody")


async def test_a_job_whose_name_was_given_away_is_not_retried(database: Database, jobs: JobService) -> None:
    first = (await jobs.submit_job(SPEC, None))["id"]
    await jobs.cancel_job(first)
    await end(database, first, JobState.CANCELLED)
    second = (await jobs.submit_job(SPEC, None))["id"]
    with pytest.raises(ConflictError, match=f"is queued by now \\({second}\\): cancel it, then retry {first}"):
        await jobs.retry_job(first)


# ---------------------------------------------------------------- cancel


async def test_cancelling_with_a_save_may_be_hurried_but_not_slowed_down(database: Database, jobs: JobService) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]

    async def saves() -> bool:
        async with database.read() as session:
            return (await session.get_one(JobRow, job_id)).cancel_saves

    await jobs.cancel_job(job_id, save=True)
    await jobs.cancel_job(job_id, save=True)
    assert await saves()
    await jobs.cancel_job(job_id)
    assert not await saves()
    await jobs.cancel_job(job_id, save=True)
    assert not await saves()
    assert (await kinds(database)).count("job_cancelling") == 1


# ---------------------------------------------------------------- drain


async def test_a_vm_is_drained_once_and_only_while_it_is_there(database: Database, tmp_path: Path) -> None:
    events, bell, registry = EventLog(database), Bell(), VmRegistry()
    machine = LocalMachine(gpus=1, device_memory_bytes=1, host="127.0.0.1", agent_command=("true",))
    provider = LocalProvider(tmp_path, "127.0.0.1:1", machine, None)
    reports = ReportService(database, events, PlanningService(), bell)
    fleet = FleetService(database, events, registry, provider, reports, bell)
    drains = DrainService(database, fleet, events, bell, lambda: NOW)
    async with database.write() as session:
        for name, state in (("a", "ready"), ("b", "gone")):
            session.add(VmRow(id=name, provider="local", state=state, history=[], gpus=1, ref={}, created_at=1.0))
    first = await drains.drain_vm("a", None)
    assert (first["state"], first["drain_deadline"]) == ("draining", None)
    again = await drains.drain_vm("a", 30.0)
    assert again["drain_deadline"] == "1970-01-01T00:02:10+00:00"
    assert (await kinds(database)) == ["vm_draining"]
    with pytest.raises(ConflictError, match="VM 'b' is gone already"):
        await drains.drain_vm("b", None)
    with pytest.raises(MissingError, match="VM 'c' does not exist"):
        await drains.drain_vm("c", None)


# ---------------------------------------------------------------- cordons


class Hosts:
    """A manager of two static hosts, or of another provider's VMs, and the agents' reports."""

    def __init__(self, database: Database, provider: Provider | None = None) -> None:
        self.database, self.registry, events, bell = database, VmRegistry(), EventLog(database), Bell()
        provider = provider or StaticProvider([StaticHost(name="a"), StaticHost(name="b")], began_at=1.0)
        reports = ReportService(database, events, PlanningService(), bell)
        self.fleet = FleetService(database, events, self.registry, provider, reports, bell, lambda: NOW)
        self.drains = DrainService(database, self.fleet, events, bell, lambda: NOW)

    async def hello(self, vm_id: str, incarnation: str) -> None:
        """As the gateway and the fleet's controller do."""
        hello = pb.Hello(vm_id=vm_id, incarnation=incarnation, gpus=1, host=vm_id)
        assert await self.fleet.admit_agent(hello) is None
        self.registry.add_hello(vm_id, rendezvous_port=1, workers=())
        await self.judge(vm_id)

    async def notice(self, vm_id: str, deadline: float) -> None:
        """As its agent reports it."""
        async with self.database.write() as session:
            await self.fleet.note_notice(session, vm_id, f"maintenance until {deadline:g}", deadline)
        await self.judge(vm_id)

    async def judge(self, vm_id: str, silent_s: float | None = None) -> VmView:
        async with self.database.write() as session:
            (facts,) = await read_vms(session, [vm_id])
            view = self.registry.make_view(facts, now=NOW, workers=0)
            if silent_s is not None:
                view = replace(view, silent_since=NOW - silent_s)
            verdict = decide_vm(NOW, view, Rules())
            if verdict is not None:
                await self.fleet.move_vm(session, await session.get_one(VmRow, vm_id), verdict.state, verdict.reason)
            (facts,) = await read_vms(session, [vm_id])
        return self.registry.make_view(facts, now=NOW, workers=0)


async def test_a_cordon_outlasts_silence_and_reboots_until_it_is_lifted(database: Database) -> None:
    hosts = Hosts(database)
    await hosts.hello("a", "first")
    assert (await hosts.drains.cordon_vm("a"))["cordoned_at"] == "1970-01-01T00:01:40+00:00"
    await hosts.drains.cordon_vm("a")
    assert not (await hosts.judge("a")).usable
    lost = await hosts.judge("a", silent_s=11.0)
    assert lost.state is VmState.LOST
    await hosts.hello("a", "after a reboot")
    back = await hosts.judge("a")
    assert (back.state, back.cordoned, back.usable) == (VmState.READY, True, False)
    assert (await hosts.drains.uncordon_vm("a"))["cordoned_at"] is None
    assert (await hosts.judge("a")).usable
    await hosts.drains.uncordon_vm("a")
    kinds_logged = [kind for kind in await kinds(database) if "cordoned" in kind]
    assert kinds_logged == ["vm_cordoned", "vm_uncordoned"], "each once"


@pytest.mark.parametrize("silent_s", [11.0, 0.1], ids=["slowly", "quickly"])
async def test_a_host_that_was_drained_is_back_but_not_used(database: Database, silent_s: float) -> None:
    hosts = Hosts(database)
    await hosts.hello("a", "first")
    assert (await hosts.drains.drain_vm("a", 30.0))["state"] == "draining"
    await hosts.judge("a", silent_s=silent_s)
    await hosts.hello("a", "upgraded")
    back = await hosts.judge("a")
    assert (back.state, back.usable, back.leave_by) == (VmState.READY, False, None)
    await hosts.drains.uncordon_vm("a")
    assert (await hosts.judge("a")).usable


@pytest.mark.parametrize("deadline", [NOW - 1.0, NOW + 60.0], ids=["late", "early"])
@pytest.mark.parametrize("silent_s", [11.0, 0.1], ids=["slowly", "quickly"])
async def test_a_host_that_reboots_after_its_notice_is_used_again(
    database: Database, silent_s: float, deadline: float
) -> None:
    """Early: its agent has left, and has let the cloud begin before the deadline."""
    hosts = Hosts(database)
    await hosts.hello("a", "first")
    await hosts.notice("a", deadline)
    leaving = await hosts.judge("a", silent_s=silent_s)
    assert leaving.state is (VmState.LOST if silent_s > 10 else VmState.DRAINING)
    await hosts.hello("a", "first")
    assert (await hosts.judge("a")).state is VmState.DRAINING, "it has not rebooted yet"
    await hosts.judge("a", silent_s=silent_s)
    await hosts.hello("a", "after the reboot")
    back = await hosts.judge("a")
    assert (back.state, back.usable, back.notice_deadline) == (VmState.READY, True, None)
    await hosts.notice("a", deadline)
    assert (await hosts.judge("a")).state is VmState.DRAINING, "a notice that is still in force is reported again"


async def test_an_uncordon_does_not_lift_a_notice_that_is_in_force(database: Database) -> None:
    hosts = Hosts(database)
    await hosts.hello("a", "first")
    await hosts.notice("a", NOW + 60.0)
    await hosts.drains.cordon_vm("a")
    document = await hosts.drains.uncordon_vm("a")
    assert (document["state"], document["notice_deadline"]) == ("draining", "1970-01-01T00:02:40+00:00")


async def test_a_notice_that_is_over_does_not_outlast_an_uncordon(database: Database) -> None:
    hosts = Hosts(database)
    await hosts.hello("a", "first")
    await hosts.notice("a", NOW - 1.0)
    assert (await hosts.judge("a", silent_s=0.1)).state is VmState.DRAINING
    document = await hosts.drains.uncordon_vm("a")
    assert (document["state"], document["notice_deadline"]) == ("ready", None)
    assert "vm_ready" in await kinds(database)


async def test_a_vm_that_is_drained_while_it_is_silent_is_given_back_when_it_is_heard_again(
    database: Database, tmp_path: Path
) -> None:
    machine = LocalMachine(gpus=1, device_memory_bytes=1, host="127.0.0.1", agent_command=("true",))
    hosts = Hosts(database, LocalProvider(tmp_path, "127.0.0.1:1", machine, None))
    async with database.write() as session:
        session.add(VmRow(id="a", provider="local", state="ready", history=[], gpus=1, ref={}, created_at=1.0))
    await hosts.hello("a", "first")
    assert (await hosts.judge("a", silent_s=11.0)).state is VmState.LOST
    assert (await hosts.drains.drain_vm("a", 30.0))["state"] == "draining"
    assert (await hosts.judge("a", silent_s=12.0)).state is VmState.LOST
    await hosts.hello("a", "first")
    back = await hosts.judge("a")
    assert (back.state, back.leave_by) == (VmState.DRAINING, NOW + 30.0)
    assert back.reason == "its heartbeats arrive again, and it was drained by the user"


async def test_a_drain_that_gives_a_vm_back_cannot_be_lifted(database: Database, tmp_path: Path) -> None:
    events, bell, registry = EventLog(database), Bell(), VmRegistry()
    machine = LocalMachine(gpus=1, device_memory_bytes=1, host="127.0.0.1", agent_command=("true",))
    provider = LocalProvider(tmp_path, "127.0.0.1:1", machine, None)
    reports = ReportService(database, events, PlanningService(), bell)
    drains = DrainService(database, FleetService(database, events, registry, provider, reports, bell), events, bell)
    async with database.write() as session:
        session.add(VmRow(id="a", provider="local", state="ready", history=[], gpus=1, ref={}, created_at=1.0))
    await drains.drain_vm("a", None)
    with pytest.raises(ConflictError, match=r"VM 'a' is draining .* cannot be kept"):
        await drains.uncordon_vm("a")
    for change in (drains.cordon_vm, drains.uncordon_vm):
        with pytest.raises(MissingError, match="VM 'c' does not exist"):
            await change("c")


# ---------------------------------------------------------------- stacks


async def test_stacks_are_asked_for_and_kept_and_an_agent_speaks_for_its_own_ranks(
    database: Database, jobs: JobService
) -> None:
    job_id = (await jobs.submit_job(SPEC, None))["id"]
    sessions, bell = AgentSessions(), Bell()
    agent = AgentSession("a", "1", ())
    sessions.add_session(agent)
    stacks = StackService(database, sessions, bell, lambda: NOW)
    rung = bell.add_listener()
    stacks.request_stacks(job_id, 2, {0: "a", 1: "away", 2: "a"})
    asked = await agent.next_message()
    assert asked is not None
    dump = asked.dump_stacks
    assert (dump.job_id, dump.generation) == (job_id, 2)

    def answer(rank: int, text: str) -> None:
        found = pb.StackDump(request_id=dump.request_id, job_id=job_id, generation=2, rank=rank, text=text)
        agent.deliver_stack(found)

    answer(0, "zero")
    answer(1, "of another VM")
    known = stacks.collect_answers(job_id, 2)
    assert known is not None
    assert {rank: (one.text, bool(one.error)) for rank, one in known.answers.items()} == {
        0: ("zero", False),
        1: ("", True),
    }
    assert not rung.is_set()
    answer(2, "t\0wo")  # whose NUL PostgreSQL takes in no text
    assert rung.is_set(), "all have answered"
    async with database.write() as session:
        stacks.store_answers(session, job_id, 2)
    kept = await stacks.list_stacks("train", None)
    assert [(one["rank"], one["vm_id"], one["text"]) for one in kept] == [
        (0, "a", "zero"),
        (1, "away", ""),
        (2, "a", "t\ufffdwo"),
    ]
    assert "out of reach" in kept[1]["error"]
    assert await stacks.list_stacks("train", 1) == []
    assert stacks.collect_answers(job_id, 3) is None
    stacks.request_stacks(job_id, 2, {0: "a", 1: "a"})
    answer(0, "late, of the first request")
    fresh = stacks.collect_answers(job_id, 2)
    assert fresh is not None
    assert fresh.answers == {}, "what was answered before says nothing about now"
    assert len(agent.stack_requests) == 1
    stacks.keep_only([])
    assert stacks.collect_answers(job_id, 2) is None
    assert not agent.stack_requests
