"""The agents' stream: Hello and Heartbeat into the registry, reports into the store, commands out.

A report is acknowledged after its transaction is committed; reports that arrive meanwhile go into the next one
together. A heartbeat is acknowledged at once, which renews the agent's lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import grpc
import structlog

from varuna_manager.agents.compute_times import ComputeTimes
from varuna_manager.agents.report_bounds import MOST_STATE_BYTES
from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.answers.errors import MissingError, UnavailableError
from varuna_manager.api.grpc.limits import HELLO_WITHIN_S, drop_excess, find_excess, find_hello_flaw, valid_port
from varuna_manager.api.grpc.peers import PeerCheck
from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.states import WaitKind
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.fleet.vm_usage import UsageBoard
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.metrics.instruments import Instruments
from varuna_manager.world.bell import Bell
from varuna_manager.world.vm_registry import Health, NewcomerReport, SentAhead, VmRegistry
from varuna_proto.bounds import MOST_EXACT, MOST_GPUS_OF_A_VM, MOST_STEP, NAME_CHARS, clean_text
from varuna_proto.failpoints import failpoint
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc

_WAIT_KINDS: Mapping[int, WaitKind] = {
    pb.WAIT_KIND_RENDEZVOUS: WaitKind.RENDEZVOUS,
    pb.WAIT_KIND_STEP: WaitKind.STEP,
    pb.WAIT_KIND_EVALUATION: WaitKind.EVALUATION,
    pb.WAIT_KIND_CHECKPOINT: WaitKind.CHECKPOINT,
    pb.WAIT_KIND_LOAD: WaitKind.LOAD,
    pb.WAIT_KIND_RESUME: WaitKind.RESUME,
}
_REPORTS_AT_ONCE = 200
_REPORTS_WAITING = 1000


class AgentGateway(agent_pb2_grpc.AgentServiceServicer):
    def __init__(  # noqa: PLR0913 - every part that the stream feeds, wired in one place
        self,
        *,
        fleet: FleetService,
        reports: ReportService,
        registry: VmRegistry,
        times: ComputeTimes,
        sessions: AgentSessions,
        bell: Bell,
        rules: Rules,
        peers: PeerCheck,
        archives: ArchiveService,
        instruments: Instruments,
        usage: UsageBoard,
    ) -> None:
        self._usage = usage
        self._archives = archives
        self._heartbeats = instruments.heartbeats
        self._peers = peers
        self._fleet = fleet
        self._reports = reports
        self._registry = registry
        self._times = times
        self._sessions = sessions
        self._bell = bell
        self._rules = rules
        self._log = structlog.get_logger("varuna.agents")

    async def Connect(  # noqa: N802 - the protocol's name
        self,
        request_iterator: AsyncIterator[pb.AgentMessage],
        context: grpc.aio.ServicerContext[pb.AgentMessage, pb.ManagerMessage],
    ) -> AsyncIterator[pb.ManagerMessage]:
        """One agent's stream, from its Hello to its end."""
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                first = await anext(request_iterator, None)
        except TimeoutError:
            return
        if first is None:
            return
        hello = first.hello
        refusal = await self._find_refusal(first, context)
        if refusal is not None:
            self._log.warning("an agent was refused", vm=hello.vm_id, reason=refusal)
            yield _make_refusal(refusal)
            return
        session = self._open_session(hello, self._peers.get_certificate_end(context))
        reading: asyncio.Task[None] | None = None
        try:
            # A revocation ends the stream that it finds. This one was not there yet when its certificate was checked.
            refusal = await self._find_revocation(hello.vm_id, context)
            if refusal is not None:
                self._log.warning("an agent was refused", vm=hello.vm_id, reason=refusal)
                yield _make_refusal(refusal)
                return
            reading = asyncio.create_task(self._read_messages(request_iterator, session))
            while (message := await session.next_message()) is not None:
                yield message
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            self._end_session(session)

    async def FetchArchive(  # noqa: N802 - the protocol's name
        self, request: pb.ArchiveRequest, context: grpc.aio.ServicerContext[pb.ArchiveRequest, pb.ArchiveChunk]
    ) -> AsyncIterator[pb.ArchiveChunk]:
        """A packed workdir, for an agent."""
        refusal = await self._peers.find_refusal(context, request.vm_id)
        if refusal is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
        session = self._sessions.get(request.vm_id)
        try:
            jobs = frozenset[str]() if session is None else session.entrusted
            if not await self._archives.is_for(jobs, request.vm_id, request.sha256):
                text = f"VM {request.vm_id!r} runs and prepares no job with archive {request.sha256[:80]!r}"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
            async for chunk in self._archives.read_archive(request.sha256):
                yield pb.ArchiveChunk(data=chunk)
        except MissingError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except StoreAwayError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _find_refusal(
        self, first: pb.AgentMessage, context: grpc.aio.ServicerContext[pb.AgentMessage, pb.ManagerMessage]
    ) -> str | None:
        """Why the agent is refused; None: it is admitted. Aborts the call if that cannot be decided now."""
        if first.WhichOneof("body") != "hello":
            return f"the first message must be Hello, not {first.WhichOneof('body')}"
        vm_id = first.hello.vm_id
        try:
            refusal = (
                find_excess(first) or find_hello_flaw(first.hello) or await self._peers.find_refusal(context, vm_id)
            )
            return refusal or await self._fleet.admit_agent(first.hello)
        except (NotLeaderError, StoreAwayError, UnavailableError) as error:
            self._registry.expect_hello(vm_id)
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except Exception:
            self._log.exception("an agent could not be admitted: it will dial again", vm=vm_id)
            await context.abort(grpc.StatusCode.INTERNAL, "the manager failed: its log has the traceback")

    async def _find_revocation(
        self, vm_id: str, context: grpc.aio.ServicerContext[pb.AgentMessage, pb.ManagerMessage]
    ) -> str | None:
        """Why the certificate is no longer valid; None: it is. Aborts the call if that cannot be decided now."""
        try:
            return await self._peers.find_refusal(context, vm_id)
        except (NotLeaderError, StoreAwayError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def _open_session(self, hello: pb.Hello, certificate_ends_at: float | None) -> AgentSession:
        running = {(worker.job_id, worker.generation) for worker in hello.workers}
        seen = {(seen.job_id, seen.generation) for seen in hello.seen_generations}
        session = AgentSession(hello.vm_id, hello.incarnation, running | seen)
        session.certificate_ends_at = certificate_ends_at
        welcome = pb.Welcome(lease_s=self._rules.lease_s, heartbeat_interval_s=self._rules.heartbeat_interval_s)
        session.send(pb.ManagerMessage(welcome=welcome))
        self._sessions.add_session(session)
        workers = [
            Health(
                job_id=worker.job_id,
                generation=worker.generation,
                rank=worker.rank,
                step=min(worker.step, MOST_STEP),
            )
            for worker in hello.workers
        ]
        self._registry.add_hello(hello.vm_id, rendezvous_port=hello.rendezvous_port, workers=workers)
        self._log.info("an agent connected", vm=hello.vm_id, workers=len(workers), version=hello.agent_version)
        self._bell.notify_listeners()
        return session

    def _end_session(self, session: AgentSession) -> None:
        if self._sessions.remove_session(session):
            self._registry.add_disconnect(session.vm_id)
            self._log.info("an agent's stream ended", vm=session.vm_id)
            self._bell.notify_listeners()

    # ------------------------------------------------------------ what comes in

    async def _read_messages(self, messages: AsyncIterator[pb.AgentMessage], session: AgentSession) -> None:
        """Handle the agent's messages until its stream ends; then end the session."""
        # If the store is slow, the queue fills up and gRPC's flow control makes the agent wait.
        reports: asyncio.Queue[pb.Report] = asyncio.Queue(_REPORTS_WAITING)
        writer: asyncio.Task[None] | None = None
        try:
            async for message in messages:
                if (reason := find_excess(message)) is not None:
                    if not message.HasField("report"):
                        self._log.warning("an agent's stream is ended", vm=session.vm_id, reason=reason)
                        return
                    self._log.warning("a report is not stored as it is", vm=session.vm_id, reason=reason)
                    message.report.CopyFrom(drop_excess(message.report))
                if message.HasField("report"):
                    if writer is None:
                        writer = asyncio.create_task(self._write_reports(reports, session))
                    await reports.put(message.report)
                elif not self._try_to_receive(message, session):
                    return
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            session.close()

    def _try_to_receive(self, message: pb.AgentMessage, session: AgentSession) -> bool:
        """Handle what is no report. False: it could not be handled, and the stream is to end."""
        kind = message.WhichOneof("body")
        try:
            match kind:
                case "heartbeat":
                    self._receive_heartbeat(message.heartbeat, session)
                case "log_chunk":
                    session.deliver_log(message.log_chunk)
                case "stack_dump":
                    session.deliver_stack(message.stack_dump)
                case other:
                    self._log.warning("an agent sent what only starts a stream", vm=session.vm_id, kind=other)
        except Exception:  # nothing else would say why the agent dials again and again
            self._log.exception("an agent's message could not be handled: the stream ends", vm=session.vm_id, kind=kind)
            return False
        return True

    def _receive_heartbeat(self, heartbeat: pb.Heartbeat, session: AgentSession) -> None:
        if self._sessions.get(session.vm_id) is not session:
            return  # a newer stream of this VM is open
        workers = tuple(_make_healths(heartbeat.workers))
        self._heartbeats.inc()
        self._times.record_workers(session.vm_id, workers)
        is_news = self._registry.add_heartbeat(
            session.vm_id,
            rendezvous_port=valid_port(heartbeat.rendezvous_port),
            workers=workers,
            preparing=heartbeat.preparing_jobs,
            prepared=heartbeat.prepared_jobs,
            setting_up=heartbeat.setting_up_jobs,
            warm=heartbeat.warm_jobs,
            newcomers=tuple(_make_newcomers(heartbeat.newcomers)),
        )
        self._registry.record_held_bytes(session.vm_id, min(heartbeat.held_bytes, MOST_STATE_BYTES))
        if heartbeat.HasField("usage"):
            self._usage.record_sample(session.vm_id, heartbeat.usage)
        if is_news:
            self._bell.notify_listeners()
        session.acknowledge(heartbeat=heartbeat.sequence)

    async def _write_reports(self, reports: asyncio.Queue[pb.Report], session: AgentSession) -> None:
        while True:
            batch = [await reports.get()]
            while not reports.empty() and len(batch) < _REPORTS_AT_ONCE:
                batch.append(reports.get_nowait())
            try:
                await self._reports.apply_reports(session.vm_id, batch)
            except (NotLeaderError, StoreAwayError):
                session.close()  # as below; logged elsewhere
                return
            except Exception:
                # Reports that are not stored are not acknowledged: the agent sends them again on its next stream.
                self._log.exception("reports could not be stored: the stream ends", vm=session.vm_id)
                session.close()
                return
            failpoint("manager.reports.stored")
            through = max(report.number for report in batch)
            session.acknowledge(reports_through=through)


def _make_healths(workers: Iterable[pb.WorkerHealth]) -> Iterable[Health]:
    for worker in workers:
        yield Health(
            job_id=worker.job_id,
            generation=worker.generation,
            rank=worker.rank,
            step=min(worker.step, MOST_STEP),
            forward_us=min(worker.forward_us, MOST_EXACT),
            backward_us=min(worker.backward_us, MOST_EXACT),
            memory_bytes=min(worker.memory_bytes, MOST_EXACT),
            wait_us=min(worker.wait_us, MOST_EXACT),
            evaluated=min(worker.evaluated, MOST_EXACT),
            waiting_for=_WAIT_KINDS.get(worker.waiting_for),
            quiet_ranks=frozenset(worker.quiet_ranks),
            sent_ahead=_make_sent_ahead(worker),
        )


def _make_sent_ahead(worker: pb.WorkerHealth) -> SentAhead | None:
    if not worker.ahead_request:
        return None
    return SentAhead(request=clean_text(worker.ahead_request, NAME_CHARS), step=min(worker.ahead_step, MOST_STEP))


def _make_newcomers(newcomers: Sequence[pb.Newcomer]) -> Iterable[NewcomerReport]:
    for newcomer in newcomers[:MOST_GPUS_OF_A_VM]:
        yield NewcomerReport(
            job_id=newcomer.job_id,
            request=newcomer.request,
            local_rank=newcomer.local_rank,
            at_door=newcomer.at_door,
            fault=clean_text(newcomer.fault, NAME_CHARS),
        )


def _make_refusal(reason: str) -> pb.ManagerMessage:
    return pb.ManagerMessage(refused=pb.Refused(reason=reason))
