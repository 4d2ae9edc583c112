"""The real manager without its servers: store, services, controllers on virtual time. It can die at any commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError

from manager_death import ManagerDiedError
from migrated_stores import migrated
from simulated_vm import Stream
from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.answers.errors import UnavailableError
from varuna_manager.controllers.fleet_controller import FleetController
from varuna_manager.controllers.job_controller import JobController, JobControllerServices, LaunchDefaults
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.controllers.vm_requests import FleetSettings
from varuna_manager.db.engine import Database
from varuna_manager.db.models import VmRow
from varuna_manager.domain.observed import Proposal, Rules
from varuna_manager.domain.sharing import RatePoint
from varuna_manager.fleet.drains import DrainService
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.jobs.jobs import JobService
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.planning import PlanningService, PlanQuestion
from varuna_manager.planning.rates import RateQuestion, RateService
from varuna_manager.providers.base import EmulatedProvider
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import Health, NewcomerReport, SentAhead, VmRegistry
from varuna_manager.world.world import World
from varuna_proto.v1 import agent_pb2 as pb
from virtual_time import VirtualTime

T = TypeVar("T")
_LOOKS_IN_A_ROW = 500


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How quick the manager is, in virtual seconds."""

    look_after_s: float = 0.3
    """From a ring to the look."""
    store_after_s: float = 0.0
    """From a report to the transaction that stores it together with the reports since."""
    quiet_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
    """Between looks when nothing rings: a fleet at rest is looked at less often, or hours would take hours."""


class MortalDatabase(Database):
    """`before` and `after` are called around every transaction that changes rows, and may raise."""

    def __init__(self, url: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__(url)
        self._before, self._after = before, after

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        self._before()
        flushed: list[object] = []
        async with super().write() as session:
            event.listen(session.sync_session, "after_flush", lambda *_: flushed.append(True))
            yield session
        if flushed:
            self._after()


class WakingBell(Bell):
    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    def notify_listeners(self) -> None:
        super().notify_listeners()
        self._wake()


class SlowPlanning(PlanningService):
    """While the planner thinks, the world goes on: what is decided then may be stale."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    async def propose_plan(self, question: PlanQuestion) -> Proposal:
        await self._meanwhile()  # type: ignore[misc]
        return await super().propose_plan(question)


class PatientRates(RateService):
    """Waits for the planner's answers however long they take in real time, which costs no virtual time."""

    async def list_rate_curves(self, questions: Iterable[RateQuestion]) -> list[tuple[RatePoint, ...] | None]:
        asked = list(questions)
        while None in (answers := await super().list_rate_curves(asked)):
            pass
        return answers


class StreamSession(AgentSession):
    """What is sent goes straight onto the simulated stream."""

    def __init__(self, stream: Stream, hello: pb.Hello, hung_up: Callable[[Stream], None]) -> None:
        running = {(worker.job_id, worker.generation) for worker in hello.workers}
        seen = {(seen.job_id, seen.generation) for seen in hello.seen_generations}
        super().__init__(hello.vm_id, hello.incarnation, running | seen)
        self._stream, self._hung_up = stream, hung_up

    def send(self, message: pb.ManagerMessage) -> None:
        stream = self._stream
        stream.carry("down", lambda: stream.vm.receive_message(stream, message))

    def close(self) -> None:
        self._hung_up(self._stream)


class ManagerEnd:
    """The manager as agents see it, from one life to the next."""

    def __init__(
        self,
        folder: Path,
        time: VirtualTime,
        chance: Random,
        rules: Rules,
        check: Callable[[], None],
        pace: Pace,
    ) -> None:
        self.url = f"sqlite:///{folder / 'manager.db'}"
        migrated(folder / "manager.db")
        self.is_up = False
        self.lives = 0
        self.dies_in: int | None = None
        """How many more points it passes before it dies; None: it lives."""
        self._folder, self._time, self._chance, self._rules, self._check = folder, time, chance, rules, check
        self._pace = pace
        self._streams: dict[Stream, StreamSession | None] = {}
        self._reports: dict[Stream, list[pb.Report]] = {}
        self._database: MortalDatabase | None = None
        self._look_at = float("inf")
        self._quiet = 0
        self._looking = False
        self._planning = SlowPlanning(self._meanwhile)
        self._rates = PatientRates(Bell())

    # ------------------------------------------------------------ life and death

    async def start(self, provider: EmulatedProvider) -> None:
        """A new process over the same store, which is all that it remembers."""
        database = MortalDatabase(self.url, self.interrupted, self._committed)
        self._database = database
        now, rules = self._time.read, self._rules
        self.lives += 1
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bell = WakingBell(self._ring)
        self.events = EventLog(database, now)
        self.registry, self.sessions = VmRegistry(now, heartbeat_interval_s=rules.heartbeat_interval_s), AgentSessions()
        self.reports = ReportService(database, self.events, self._planning, self.bell, now)
        self.fleet = FleetService(database, self.events, self.registry, provider, self.reports, self.bell, now)
        self.jobs = JobService(
            database, self.events, self.bell, now, new_id=lambda: f"{self._chance.getrandbits(32):08x}"
        )
        self.drains = DrainService(database, self.fleet, self.events, self.bell, now)
        world = World(database, self.registry, now)
        self.loader = SnapshotLoader(database, world, rules, now)
        stacks = StackService(database, self.sessions, self.bell, now)
        self._controllers = (
            JobController(
                database,
                self.loader,
                JobControllerServices(
                    sessions=self.sessions, planning=self._planning, rates=self._rates, stacks=stacks,
                    events=self.events,
                ),
                rules,
                LaunchDefaults(checkpoint_root=f"file://{self._folder}/checkpoints", profile_cache_url=""),
                period_s=0.5,
                now=now,
            ),
            FleetController(
                database, world, self.fleet, self.events, self.bell, FleetSettings(rules=rules), now=now,
                chance=self._chance,
            ),
        )  # fmt: skip
        self.is_up = True
        self._ring()

    async def die(self) -> None:
        """SIGKILL: what was not committed and what was under way on streams is lost."""
        self.is_up, self.dies_in = False, None
        self._look_at = float("inf")
        streams, self._streams, self._reports = list(self._streams), {}, {}
        for stream in streams:
            stream.is_open = False
            self._time.after(self._chance.uniform(0.0, 0.2), lambda stream=stream: stream.vm.stream_ended(stream))
        assert self._database is not None
        await self._database.close()

    async def quarantine_vm(self, vm_id: str, seconds: float) -> None:
        """As a decision of its own would."""
        assert self._database is not None
        async with self._database.write() as session:
            row = await session.get_one(VmRow, vm_id)
            row.quarantined_until, row.quarantines = self._time.now + seconds, row.quarantines + 1

    def interrupted(self) -> None:
        """A point at which the manager might die."""
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                if not self._died.done():
                    self._died.set_result(None)
                raise ManagerDiedError

    def _committed(self) -> None:
        self._check()
        self.interrupted()

    # ------------------------------------------------------------ the controllers' loop

    def _ring(self) -> None:
        self._quiet = 0
        self._look_soon(self._pace.look_after_s)

    def _look_soon(self, seconds: float) -> None:
        if self._time.now + seconds < self._look_at:
            look_at = self._look_at = self._time.now + seconds
            self._time.at(look_at, lambda: self._look(look_at))

    async def _look(self, look_at: float) -> None:
        if look_at != self._look_at or not self.is_up:
            return
        self._look_at = float("inf")
        if self._looking:
            self._look_soon(0.05)
            return
        self._looking = True
        try:
            controllers = list(self._controllers)
            self._chance.shuffle(controllers)
            for controller in controllers:
                await self._reconcile(controller)
        finally:
            self._looking = False
        self._look_soon(self._pace.quiet_s[min(self._quiet, len(self._pace.quiet_s) - 1)])
        self._quiet += 1

    async def _reconcile(self, controller: JobController | FleetController) -> None:
        for _ in range(_LOOKS_IN_A_ROW):
            try:
                if await controller.reconcile_once() > 0:
                    break
            except StaleDataError:
                continue
        else:
            raise AssertionError(f"the {controller.name} controller never comes to rest")
        if isinstance(controller, JobController):
            defects = {**controller._defects.known, **controller._loader._defects.known, **controller._flaws}
            assert not defects, defects

    async def _meanwhile(self) -> None:
        if self._chance.random() < 0.2:
            until = self._time.now + self._chance.uniform(0.0, 0.3)
            while self._time.next_at <= until:
                await self._time.step()

    # ------------------------------------------------------------ what agents send

    def received(self, stream: Stream, message: pb.AgentMessage) -> None:
        if not self.is_up:
            return
        match message.WhichOneof("body"):
            case "hello":
                self._streams[stream] = None
                self._time.after(0.0, lambda: self._hello(stream, message.hello))
            case "heartbeat":
                self._heartbeat(stream, message.heartbeat)
            case "report" if stream in self._streams:
                if not self._reports:
                    self._time.after(self._pace.store_after_s, self._store)
                self._reports.setdefault(stream, []).append(message.report)

    async def _hello(self, stream: Stream, hello: pb.Hello) -> None:
        if stream not in self._streams:
            return
        try:
            refusal = await self._or_death(self.fleet.admit_agent(hello))
        except UnavailableError:
            self._hung_up(stream)
            return
        if refusal is not None:
            message = pb.ManagerMessage(refused=pb.Refused(reason=refusal))
            stream.carry("down", lambda: stream.vm.receive_message(stream, message))
            return
        if not stream.is_open:
            self._streams.pop(stream, None)
            return
        session = self._streams[stream] = StreamSession(stream, hello, self._hung_up)
        welcome = pb.Welcome(lease_s=self._rules.lease_s, heartbeat_interval_s=self._rules.heartbeat_interval_s)
        session.send(pb.ManagerMessage(welcome=welcome))
        self.sessions.add_session(session)
        workers = [Health(job_id=x.job_id, generation=x.generation, rank=x.rank, step=x.step) for x in hello.workers]
        self.registry.add_hello(hello.vm_id, rendezvous_port=hello.rendezvous_port, workers=workers)
        self.bell.notify_listeners()

    async def _or_death(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a task of the manager's own. When the manager dies in it, nobody else would notice."""
        task = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {task, self._died}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._died.done():
            task.cancel()
            raise ManagerDiedError
        return task.result()

    def _heartbeat(self, stream: Stream, heartbeat: pb.Heartbeat) -> None:
        session = self._streams.get(stream)
        if session is None or self.sessions.get(session.vm_id) is not session:
            return
        workers = [
            Health(
                job_id=x.job_id,
                generation=x.generation,
                rank=x.rank,
                step=x.step,
                sent_ahead=SentAhead(x.ahead_request, x.ahead_step) if x.ahead_request else None,
            )
            for x in heartbeat.workers
        ]
        newcomers = [
            NewcomerReport(
                job_id=x.job_id, request=x.request, local_rank=x.local_rank, at_door=x.at_door, fault=x.fault
            )
            for x in heartbeat.newcomers
        ]
        is_news = self.registry.add_heartbeat(
            session.vm_id,
            rendezvous_port=heartbeat.rendezvous_port,
            workers=workers,
            prepared=heartbeat.prepared_jobs,
            setting_up=heartbeat.setting_up_jobs,
            newcomers=newcomers,
        )
        if is_news:
            self.bell.notify_listeners()
        session.send(pb.ManagerMessage(ack=pb.Ack(heartbeat_sequence=heartbeat.sequence)))

    async def _store(self) -> None:
        """What all agents have reported by now."""
        reported, self._reports = self._reports, {}
        waiting = [(session, reports) for stream, reports in reported.items() if (session := self._streams.get(stream))]
        if waiting:
            await self._or_death(self._store_all(waiting))

    async def _store_all(self, waiting: Sequence[tuple[StreamSession, list[pb.Report]]]) -> None:
        await asyncio.gather(*(self.reports.apply_reports(session.vm_id, reports) for session, reports in waiting))
        for session, reports in waiting:
            through = max(report.number for report in reports)
            session.send(pb.ManagerMessage(ack=pb.Ack(reports_through=through)))

    def broke(self, stream: Stream) -> None:
        """The manager sees that the stream is over."""
        session = self._streams.pop(stream, None)
        self._reports.pop(stream, None)
        if session is not None and self.sessions.remove_session(session):
            self.registry.add_disconnect(session.vm_id)
            self.bell.notify_listeners()

    def _hung_up(self, stream: Stream) -> None:
        """The manager's end closes the stream."""
        if stream.is_open:
            stream.carry("down", lambda: stream.vm.stream_ended(stream))
