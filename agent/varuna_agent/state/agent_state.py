"""The agent's state machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from varuna_agent.state import messages
from varuna_agent.state.admission import Identity, describe_device_conflict, describe_flaw, make_worker
from varuna_agent.state.conversation import Conversation
from varuna_agent.state.events import (
    Event,
    ManagerMessageReceived,
    NoticeReceived,
    PreparationEnded,
    ProcessEnded,
    ProcessNotStarted,
    RendezvousPortOpened,
    StateStored,
    StreamClosed,
    StreamOpened,
    TerminationRequested,
    Tick,
    WarmJobsChanged,
    WorkerConnected,
    WorkerDisconnected,
    WorkerMessageReceived,
)
from varuna_agent.state.folder_preparations import FolderPreparations
from varuna_agent.state.hosted_worker import HostedWorker
from varuna_agent.state.hosted_workers import HostedWorkers
from varuna_agent.state.instructions import (
    ClaimRendezvousPort,
    ExitAgent,
    HangUp,
    Instruction,
    ReadLogs,
    SaveSeenGenerations,
    SendMessage,
)
from varuna_agent.state.kept_memories import KeptMemory
from varuna_agent.state.newcomers import HostedNewcomer
from varuna_agent.state.reporter import Reporter
from varuna_agent.state.survivors import Survivor
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.state_use import StateUse
from varuna_proto.v1 import agent_pb2


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Times that the manager's Welcome does not set, in seconds."""

    silence_s: float = 5.0
    """The agent gives up a stream after this long without a message from the manager. For the first one it waits longer
    after streams on which none came."""
    supersede_grace_s: float = 1.0
    """Time for workers to leave when a newer generation takes their place."""
    supersede_in_place_grace_s: float = 60.0
    """The same when it goes on in their processes: they may finish their share of the step."""
    terminate_grace_s: float = 5.0
    """Time for workers to leave when a signal asks the agent to end."""
    drain_linger_s: float = 10.0
    """Time for a drained agent to hand over its last reports."""
    terminate_store_s: float = 30.0
    """The same where they put their state into memory that outlives the agent."""
    terminate_linger_s: float = 1.0
    """Time for an agent that a signal ends to hand over its last reports."""
    keep_survivors_s: float = 120.0
    """Time for which a process that has left its generation with its state waits for its next rank, and for which it
    gives its state to a generation without workers here; 0: none stays."""
    assignment_s: float = 10.0
    """Time for such a process to connect with its next rank."""
    answer_s: float = 60.0
    """Time for it to begin to give its state, which a GPU first copies to the host."""
    keep_memory_s: float = 900.0
    """Time for which state that a worker has left in memory waits for a generation that takes it; 0: none is left."""
    store_s: float = 30.0
    """Time for a worker that has left its generation to put its state there."""


@dataclass(frozen=True)
class _Departure:
    """The agent exits when its last worker has ended."""

    reason: str
    code: int
    linger_s: float
    is_drain: bool = False


_MAX_SEEN_JOBS = 1000
"""The manager itself knows that older jobs are over."""


class AgentState:
    """Knows which workers run, which reports are unacknowledged, and whether the lease holds.

    `handle_event` is the only entry; it returns the instructions to carry out, in order. No message of the manager or
    of a worker makes it block or fail: a command that cannot be followed is refused or becomes the exit of its workers.

    Args:
        seen: the newest generation of each job that this VM has seen, as the last `SaveSeenGenerations` had it.
    """

    def __init__(
        self, identity: Identity, timings: Timings | None = None, seen: Mapping[str, int] | None = None
    ) -> None:
        self.identity = identity
        self._timings = timings or Timings()
        self._conversation = Conversation(silence_s=self._timings.silence_s)
        self._reports = Reporter(self._conversation)
        self._workers = HostedWorkers(
            identity.device,
            self._reports,
            keep_survivors_s=self._timings.keep_survivors_s,
            assignment_s=self._timings.assignment_s,
            answer_s=self._timings.answer_s,
            keep_memory_s=self._timings.keep_memory_s,
            store_s=self._timings.store_s,
        )
        self._seen = dict(seen or {})  # newest generation of each job, launched here or not; the last one seen is last
        self._launched: dict[str, int] = {}
        self._rendezvous_port = 0
        self._warming: frozenset[str] = frozenset()
        self._warm: frozenset[str] = frozenset()
        self._preparations = FolderPreparations()
        self._no_launches = ""
        self._departure: _Departure | None = None
        self._exit_at: float | None = None
        self._has_exited = False

    # ------------------------------------------------------------ queries

    @property
    def workers(self) -> tuple[HostedWorker, ...]:
        return self._workers.all

    @property
    def survivors(self) -> tuple[Survivor, ...]:
        """The processes that have left their generation and have not ended."""
        return self._workers.survivors

    @property
    def memories(self) -> tuple[KeptMemory, ...]:
        """What workers that have ended, or are about to, have left in memory files."""
        return self._workers.memories

    def may_store(self, key: WorkerKey, secret: str) -> bool:
        """Whether a process that presents itself as that worker may leave its state in memory."""
        return self._workers.may_store(key, secret)

    def list_memories(self, key: WorkerKey, secret: str) -> list[WorkerKey]:
        """The workers whose memory a process that presents itself as worker `key` gives to its generation."""
        return self._workers.list_memories(key, secret)

    def adopt_memory(self, key: WorkerKey, step: int, size: int, now: float) -> None:
        """Before the first event: the agent's process before this one kept it."""
        self._workers.adopt_memory(key, step, size, now)

    @property
    def newcomers(self) -> tuple[HostedNewcomer, ...]:
        """The processes that were started ahead for a generation to come."""
        return self._workers.newcomers

    @property
    def unacknowledged(self) -> tuple[agent_pb2.Report, ...]:
        return self._reports.outbox.unacknowledged

    @property
    def is_welcome(self) -> bool:
        """Whether a manager has welcomed this agent on the open stream."""
        return self._conversation.is_welcome

    @property
    def is_departing(self) -> bool:
        """Whether the agent exits when its last worker has ended."""
        return self._departure is not None

    @property
    def is_drained(self) -> bool:
        """Whether the agent exits because the manager gives this VM up, and not because of a signal or a refusal."""
        return self._departure is not None and self._departure.is_drain

    @property
    def warm_jobs(self) -> frozenset[str]:
        """The jobs whose workers would start at once."""
        return self._warm

    def has_worker(self, key: WorkerKey) -> bool:
        """Whether the worker's exit has not been reported."""
        return self._workers.has_worker(key)

    def is_expected(self, key: WorkerKey) -> bool:
        """Whether a worker that presents itself as `key` may connect."""
        return self._workers.is_expected(key)

    def next_deadline(self) -> float | None:
        """When to send the next Tick, unless another event comes first."""
        deadlines = [*self._conversation.list_deadlines(), *self._workers.list_deadlines()]
        if self._workers.has_running and self._conversation.lease_ends_at is not None:
            deadlines.append(self._conversation.lease_ends_at)
        if self._exit_at is not None and not self._has_exited:
            deadlines.append(self._exit_at)
        return min(deadlines, default=None)

    # ------------------------------------------------------------ events

    def handle_event(self, event: Event, now: float) -> tuple[Instruction, ...]:
        """Decide what to do about `event`. `now`: seconds on a clock that never goes back and counts suspended time."""
        # The lease first: after the VM was suspended, a Welcome may come before the Tick, and must not revive it.
        return (*self._enforce_lease(now), *self._dispatch_event(event, now), *self._exit_when_done(now))

    def _dispatch_event(self, event: Event, now: float) -> Iterator[Instruction]:  # noqa: C901 - a case for each event
        match event:
            case ManagerMessageReceived(message):
                yield from self._handle_manager_message(message, now)
            case WorkerMessageReceived(key, message):
                yield from self._follow_newcomers(self._workers.handle_message(key, message, now), now)
            case WorkerConnected(key, pid):
                yield from self._workers.handle_connection(key, pid, now)
            case WorkerDisconnected(key):
                yield from self._workers.handle_disconnection(key)
            case ProcessEnded(key, exit_code, log_tail):
                yield from self._follow_newcomers(self._workers.handle_process_end(key, exit_code, log_tail, now), now)
            case ProcessNotStarted(key, reason):
                yield from self._follow_newcomers(self._workers.handle_failed_start(key, reason, now), now)
            case StateStored(key, step, size):
                self._workers.handle_state_stored(key, step, size, now)
            case RendezvousPortOpened(port):
                self._rendezvous_port = port
                yield from self._send_heartbeat(now)
            case NoticeReceived():
                yield from self._reports.add_notice(event, now)
            case StreamOpened():
                self._conversation.open_stream(now)
                yield SendMessage(agent_pb2.AgentMessage(hello=self._make_hello()))
            case StreamClosed():
                self._conversation.close_stream()
            case Tick():
                yield from self._handle_tick(now)
            case WarmJobsChanged(warming, warm):
                self._warming, self._warm = warming, warm
                yield from self._send_heartbeat(now)
            case PreparationEnded():
                yield from self._handle_preparation_end(event, now)
            case TerminationRequested(reason, keeps_memory):
                stores = keeps_memory and self._timings.keep_memory_s > 0
                grace_s = self._timings.terminate_store_s if stores else self._timings.terminate_grace_s
                departure = _Departure(reason, 0, self._timings.terminate_linger_s)
                yield from self._start_departure(departure, grace_s, now, StateUse(keep=stores, store=stores))
            case _:
                assert_never(event)

    def _handle_manager_message(self, message: agent_pb2.ManagerMessage, now: float) -> Iterator[Instruction]:  # noqa: C901 - a case for each message
        self._conversation.record_message(now)
        match message.WhichOneof("body"):
            case "welcome":
                self._conversation.accept_welcome(message.welcome, now)
                yield from self._reports.resend_all(now)
                yield from self._handle_tick(now)
            case "ack":
                self._conversation.renew_lease(message.ack.heartbeat_sequence)
                self._reports.outbox.discard_through(message.ack.reports_through)
            case "launch":
                yield from self._handle_launch(message.launch, now)
            case "stop":
                yield from self._handle_stop(message.stop, now)
            case "drain":
                yield from self._handle_drain(message.drain.reason, now)
            case "fetch_logs":
                yield ReadLogs(message.fetch_logs)
            case "dump_stacks":
                yield from self._workers.dump_stacks(message.dump_stacks)
            case "prepare":
                if not self._no_launches:
                    yield from self._follow_preparations(self._preparations.add_request(message.prepare), now)
            case "start_newcomers":
                yield from self._handle_start_newcomers(message.start_newcomers, now)
            case "end_newcomers":
                job_id = message.end_newcomers.job_id
                reason = "the manager no longer wants it"
                yield from self._workers.end_newcomers(lambda newcomer: newcomer.key.job_id == job_id, reason)
            case "send_ahead":
                yield from self._workers.send_ahead(message.send_ahead)
            case "keep_prepared":
                yield from self._follow_preparations(self._preparations.keep_only(message.keep_prepared.job_ids), now)
            case "refused":
                reason = f"the manager refused this VM: {message.refused.reason}"
                yield from self._start_departure(_Departure(reason, 1, 0.0), 0.0, now)
            case None:
                pass  # a newer manager's message that this agent does not know

    # ------------------------------------------------------------ commands

    def _handle_launch(self, launch: agent_pb2.Launch, now: float) -> Iterator[Instruction]:
        if self._launched.get(launch.job_id) == launch.generation == self._seen.get(launch.job_id):
            return  # repeated: its workers run, or their exits are reported
        refusal = self._describe_refusal(launch, now)
        if refusal is not None:
            yield from self._reports.add_report(
                messages.make_command_refused(launch.job_id, launch.generation, refusal)
            )
            return
        self._launched[launch.job_id] = launch.generation
        yield from self._record_generation(launch.job_id, launch.generation)
        reason = f"generation {launch.generation} takes its place"
        yield from self._workers.end_workers(
            lambda worker: worker.key.job_id == launch.job_id,
            agent_pb2.STOP_MODE_LEAVE_NOW,
            self._timings.supersede_in_place_grace_s if launch.in_place else self._timings.supersede_grace_s,
            reason=reason,
            now=now,
            state_use=StateUse(keep=launch.in_place),
        )
        yield from self._admit_workers(launch, now)

    def _handle_start_newcomers(self, command: agent_pb2.StartNewcomers, now: float) -> Iterator[Instruction]:
        launch = command.launch
        flaw = self._describe_refusal(launch, now)
        if flaw is not None and describe_flaw(launch, self.identity):
            return  # no manager sends it, and it could not even be reported by its devices
        yield from self._workers.start_newcomers(command, flaw or "")
        yield from self._send_heartbeat(now)

    def _handle_preparation_end(self, event: PreparationEnded, now: float) -> Iterator[Instruction]:
        if event.error and self._preparations.is_current(event.job_id):
            yield from self._reports.add_report(messages.make_setup_failed(event.job_id, event.exit_code, event.error))
        yield from self._follow_preparations(
            self._preparations.end_preparation(event.job_id, is_ready=not event.error), now
        )

    def _follow_preparations(self, instructions: Iterator[Instruction], now: float) -> Iterator[Instruction]:
        """Carry out preparations; if the ready or unfinished jobs change, send a heartbeat at once."""
        before = self._preparations.ready, self._preparations.unfinished
        yield from instructions
        if (self._preparations.ready, self._preparations.unfinished) != before:
            yield from self._send_heartbeat(now)

    def _follow_newcomers(self, instructions: Iterator[Instruction], now: float) -> Iterator[Instruction]:
        """Carry out what follows from an event of a process; a newcomer's news go out at once in a heartbeat."""
        before = self._workers.make_newcomer_statuses()
        yield from instructions
        if self._workers.make_newcomer_statuses() != before:
            yield from self._send_heartbeat(now)

    def _send_heartbeat(self, now: float) -> Iterator[Instruction]:
        """Send a heartbeat before the next one is due."""
        self._conversation.hasten_heartbeat(now)
        yield from self._handle_tick(now)

    def _record_generation(self, job_id: str, generation: int) -> Iterator[Instruction]:
        if generation <= self._seen.get(job_id, 0):
            return
        self._seen.pop(job_id, None)
        self._seen[job_id] = generation
        while len(self._seen) > _MAX_SEEN_JOBS:
            oldest = next(iter(self._seen))
            del self._seen[oldest]
            self._launched.pop(oldest, None)
        yield SaveSeenGenerations(dict(self._seen))

    def _describe_refusal(self, launch: agent_pb2.Launch, now: float) -> str | None:
        """Why this Launch cannot be followed; None when it can."""
        newest = self._seen.get(launch.job_id, 0)
        vm_id = self.identity.vm_id
        if launch.generation <= newest:
            return f"generation {launch.generation} is over: VM {vm_id} has seen generation {newest} of the job"
        if self._no_launches:
            return f"VM {vm_id} takes no launches: {self._no_launches}"
        if self._conversation.is_lease_over(now):
            return f"VM {vm_id} has no lease: no heartbeat was acknowledged for {self._conversation.lease_s:g} s"
        return describe_flaw(launch, self.identity) or describe_device_conflict(launch, self.workers)

    def _admit_workers(self, launch: agent_pb2.Launch, now: float) -> Iterator[Instruction]:
        ranks = sorted(assignment.rank for assignment in launch.workers)
        has_rank_0 = bool(ranks) and ranks[0] == 0
        workers = [
            make_worker(launch, assignment, self.identity.device, reports_steps=assignment.rank == ranks[0])
            for assignment in launch.workers
        ]
        if has_rank_0 and launch.rendezvous_port != self._rendezvous_port:
            reason = (
                f"rendezvous port stale: the launch names {launch.rendezvous_port}, "
                f"VM {self.identity.vm_id} holds {self._rendezvous_port} now"
            )
            for worker in workers:
                exited = worker.make_unstarted_exit(agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED, reason)
                held = self._workers.get_held(worker)
                if held is not None:
                    exited.held.CopyFrom(held)
                yield from self._reports.add_report(agent_pb2.Report(worker_exited=exited))
            return
        if has_rank_0:
            self._rendezvous_port = 0  # claimed; RendezvousPortOpened brings the next one
            yield ClaimRendezvousPort(launch.rendezvous_port)
        yield from self._workers.add_workers(launch, workers, now)

    def _handle_stop(self, stop: agent_pb2.Stop, now: float) -> Iterator[Instruction]:
        """End the generation, and older ones of the job. Stopping does no harm, so the agent never refuses it.

        If none of its workers are here, its Launch may have been lost on the way. A late Launch would be refused from
        now on, and the manager must know that, or it would wait for ever for the ends of workers that never started.

        What gives its state to a generation that is to save it stays until that has it.
        """
        key = (stop.job_id, stop.generation)
        if all(worker.key.generation_key != key for worker in self.workers):
            reason = f"generation {stop.generation} was stopped, and nothing of it runs on VM {self.identity.vm_id}"
            yield from self._reports.add_report(messages.make_command_refused(stop.job_id, stop.generation, reason))
        yield from self._record_generation(stop.job_id, stop.generation)
        reason = "the manager stopped the generation"
        yield from self._workers.end_workers(
            lambda worker: worker.key.job_id == stop.job_id and worker.key.generation <= stop.generation,
            stop.mode or agent_pb2.STOP_MODE_LEAVE_NOW,
            stop.grace_s,
            reason=reason,
            now=now,
            state_use=StateUse(
                keep=stop.keep_state,
                in_place=stop.in_place,
                within_step=stop.within_step,
                spare=stop.spare,
                store=stop.store_state,
            ),
        )
        if stop.keep_state:
            self._workers.keep_survivors_longer(stop.job_id, stop.generation, stop.grace_s)
        else:
            saving = stop.generation if stop.mode == agent_pb2.STOP_MODE_SAVE_FIRST else None
            yield from self._workers.end_survivors(
                lambda survivor: (
                    survivor.key.job_id == stop.job_id
                    and survivor.newest_generation <= stop.generation
                    and survivor.gives_to != saving
                ),
                reason,
            )
            yield from self._workers.end_newcomers(lambda newcomer: newcomer.key.job_id == stop.job_id, reason)
            yield from self._workers.free_memories(
                lambda memory: (
                    memory.key.job_id == stop.job_id
                    and memory.key.generation < stop.generation
                    and memory.gives_to != saving
                ),
                reason,
            )

    def _handle_drain(self, reason: str, now: float) -> Iterator[Instruction]:
        reason = f"draining: {reason or 'the manager ordered it'}"
        self._no_launches = self._no_launches or reason
        self._departure = self._departure or _Departure(reason, 0, self._timings.drain_linger_s, is_drain=True)
        yield from self._workers.cancel_waiting(reason, now)
        yield from self._workers.keep_no_survivors(reason, now)

    def _start_departure(
        self, departure: _Departure, grace_s: float, now: float, state_use: StateUse | None = None
    ) -> Iterator[Instruction]:
        """End all workers, then the agent. `state_use`: what becomes of the workers' state; None: nothing."""
        self._no_launches = departure.reason
        self._departure = replace(departure, is_drain=self.is_drained)
        self._exit_at = None
        use = state_use or StateUse()
        yield from self._workers.end_workers(
            lambda worker: True,
            agent_pb2.STOP_MODE_LEAVE_NOW,
            grace_s,
            reason=departure.reason,
            now=now,
            excuse=agent_pb2.EXIT_CAUSE_AGENT_ENDED,
            state_use=use,
        )
        yield from self._workers.keep_no_survivors(departure.reason, now, store=use.store)

    # ------------------------------------------------------------ messages

    def _make_hello(self) -> agent_pb2.Hello:
        return messages.make_hello(
            self.identity,
            self.workers,
            self._seen,
            rendezvous_port=self._rendezvous_port,
            first_report=self._reports.outbox.first_report,
        )

    # ------------------------------------------------------------ time

    def _enforce_lease(self, now: float) -> Iterator[Instruction]:
        if self._conversation.is_lease_over(now):
            reason = f"the lease is over: the manager acknowledged no heartbeat for {self._conversation.lease_s:g} s"
            yield from self._workers.end_workers(
                lambda worker: True,
                agent_pb2.STOP_MODE_LEAVE_NOW,
                0.0,
                reason=reason,
                now=now,
                excuse=agent_pb2.EXIT_CAUSE_LEASE_OVER,
            )
            yield from self._workers.end_survivors(lambda survivor: True, reason)
            yield from self._workers.end_newcomers(lambda newcomer: True, reason)

    def _handle_tick(self, now: float) -> Iterator[Instruction]:
        yield from self._workers.kill_overdue(now)
        if self._conversation.is_silent(now):
            silence_s = self._conversation.silence_s
            self._conversation.give_up_stream()
            yield HangUp(f"nothing came from the manager for {silence_s:g} s")
        if self._conversation.is_heartbeat_due(now):
            yield from self._reports.send_steps()
            heartbeat = agent_pb2.Heartbeat(
                sequence=self._conversation.next_sequence(now),
                rendezvous_port=self._rendezvous_port,
                workers=[worker.health for worker in self.workers],
                preparing_jobs=sorted(self._warming),
                warm_jobs=sorted(self._warm),
                prepared_jobs=sorted(self._preparations.ready),
                setting_up_jobs=sorted(self._preparations.unfinished),
                newcomers=self._workers.make_newcomer_statuses(),
                held_bytes=sum(memory.bytes for memory in self.memories),
            )
            yield SendMessage(agent_pb2.AgentMessage(heartbeat=heartbeat))

    def _exit_when_done(self, now: float) -> Iterator[Instruction]:
        """A departing agent exits once no process is left and its reports are stored, or the time for that is over."""
        if self._departure is None or self._workers.have_processes or self._has_exited:
            return
        if self._exit_at is None:
            self._exit_at = now + self._departure.linger_s
        if self._reports.outbox.is_empty or now >= self._exit_at:
            self._has_exited = True
            yield ExitAgent(self._departure.code, self._departure.reason)
