"""The agent's state machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from varuna_agent.state import messages
from varuna_agent.state.admission import Identity, device_in_use, flaw_of, new_worker
from varuna_agent.state.conversation import Conversation
from varuna_agent.state.preparations import Preparations
from varuna_agent.state.reports import Reports
from varuna_agent.state.stimuli import (
    ClaimRendezvous,
    Event,
    ExitAgent,
    HangUp,
    Instruction,
    ManagerSaid,
    NoticeSeen,
    Prepared,
    Preparing,
    ProcessEnded,
    ProcessNotStarted,
    ReadLogs,
    Remember,
    RendezvousOpened,
    Send,
    StreamClosed,
    StreamOpened,
    Terminate,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
    WorkerKey,
    WorkerSaid,
)
from varuna_agent.state.worker import Worker
from varuna_agent.state.workers import Workers
from varuna_proto.bounds import NAME_CHARS, clean_text
from varuna_proto.v1 import agent_pb2


@dataclass(frozen=True, kw_only=True)
class Timings:
    """What the manager's Welcome does not set, in seconds."""

    silence_s: float = 5.0
    """A stream on which the manager says nothing for this long is given up."""
    supersede_grace_s: float = 1.0
    """What workers get to leave when a newer generation takes their place."""
    terminate_grace_s: float = 5.0
    """What workers get to leave when the agent is asked to end."""
    drain_linger_s: float = 10.0
    """How long a drained agent tries to hand over its last reports."""
    terminate_linger_s: float = 1.0
    """The same for an agent that was asked to end."""


@dataclass(frozen=True)
class _Leaving:
    """The agent goes when nothing runs any more."""

    reason: str
    code: int
    linger_s: float


_MAX_SEEN_JOBS = 1000
"""Of jobs that were here long ago the manager knows itself that they are over."""


class AgentState:
    """Which workers run, what was reported, whether the agent may still run them.

    `handle` is the only way in; it returns what is to be done, in order. Nothing in here blocks or fails for what
    the manager or a worker says: a command that cannot be followed is refused or becomes the exit of its workers.

    Args:
        seen: the newest generation of each job that this VM has seen before, as `Remember` said it last.
    """

    def __init__(
        self, identity: Identity, timings: Timings | None = None, seen: Mapping[str, int] | None = None
    ) -> None:
        self.identity = identity
        self._timings = timings or Timings()
        self._conversation = Conversation(silence_s=self._timings.silence_s)
        self._reports = Reports(self._conversation)
        self._workers = Workers(identity.device, self._reports)
        self._seen = dict(seen or {})  # newest generation of each job, launched here or not; the last seen at the end
        self._launched: dict[str, int] = {}
        self._rendezvous_port = 0
        self._preparing: frozenset[str] = frozenset()
        self._warm: frozenset[str] = frozenset()
        self._preparations = Preparations()
        self._notices: set[str] = set()
        self._no_launches = ""
        self._leaving: _Leaving | None = None
        self._exit_at: float | None = None
        self._has_exited = False

    # ------------------------------------------------------------ asking

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._workers.all

    @property
    def unacknowledged(self) -> tuple[agent_pb2.Report, ...]:
        return self._reports.outbox.unacknowledged

    @property
    def is_welcome(self) -> bool:
        """Whether a manager has taken this agent on the stream that is open."""
        return self._conversation.is_welcome

    @property
    def warm_jobs(self) -> frozenset[str]:
        """The jobs whose workers would start at once."""
        return self._warm

    def expects(self, key: WorkerKey) -> bool:
        """Whether a worker that says it is `key` may connect."""
        return self._workers.expects(key)

    def next_deadline(self) -> float | None:
        """When to send the next Tick, if nothing else happens before."""
        deadlines = [*self._conversation.deadlines(), *self._workers.deadlines()]
        if self._workers.run and self._conversation.lease_ends_at is not None:
            deadlines.append(self._conversation.lease_ends_at)
        if self._exit_at is not None and not self._has_exited:
            deadlines.append(self._exit_at)
        return min(deadlines, default=None)

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> tuple[Instruction, ...]:
        """What to do about `event`. `now`: seconds on a clock that never goes back and counts suspended time."""
        # The lease first: after the VM was suspended, a Welcome may come before the Tick, and must not revive it.
        return (*self._enforce_lease(now), *self._dispatch(event, now), *self._exit_when_done(now))

    def _dispatch(self, event: Event, now: float) -> Iterator[Instruction]:
        match event:
            case ManagerSaid(message):
                yield from self._manager_said(message, now)
            case WorkerSaid(key, message):
                yield from self._workers.said(key, message, now)
            case WorkerConnected(key, pid):
                yield from self._workers.connected(key, pid, now)
            case WorkerDisconnected(key):
                self._workers.disconnected(key)
            case ProcessEnded(key, exit_code, log_tail):
                yield from self._workers.process_ended(key, exit_code, log_tail, now)
            case ProcessNotStarted(key, reason):
                yield from self._workers.process_not_started(key, reason, now)
            case RendezvousOpened(port):
                self._rendezvous_port = port
                yield from self._send_heartbeat(now)
            case NoticeSeen():
                yield from self._notice_seen(event)
            case StreamOpened():
                self._conversation.opened(now)
                yield Send(agent_pb2.AgentMessage(hello=self._hello()))
            case StreamClosed():
                self._conversation.closed()
            case Tick():
                yield from self._tick(now)
            case Preparing(job_ids, warm):
                self._preparing, self._warm = job_ids, warm
                yield from self._send_heartbeat(now)
            case Prepared():
                yield from self._folder_prepared(event, now)
            case Terminate(reason):
                yield from self._leave(
                    _Leaving(reason, 0, self._timings.terminate_linger_s), self._timings.terminate_grace_s, now
                )
            case _:
                assert_never(event)

    def _manager_said(self, message: agent_pb2.ManagerMessage, now: float) -> Iterator[Instruction]:
        self._conversation.heard(now)
        match message.WhichOneof("body"):
            case "welcome":
                self._conversation.welcomed(message.welcome, now)
                yield from self._reports.everything_again()
                yield from self._tick(now)
            case "ack":
                self._conversation.acknowledged(message.ack.heartbeat_sequence)
                self._reports.outbox.acknowledge(message.ack.reports_through)
            case "launch":
                yield from self._launch(message.launch, now)
            case "stop":
                yield from self._stop(message.stop, now)
            case "drain":
                yield from self._drain(message.drain.reason, now)
            case "fetch_logs":
                yield ReadLogs(message.fetch_logs)
            case "dump_stacks":
                yield from self._workers.dump_stacks(message.dump_stacks)
            case "prepare":
                if not self._no_launches:
                    yield from self._prepare(self._preparations.request(message.prepare), now)
            case "keep_prepared":
                yield from self._prepare(self._preparations.keep_only(message.keep_prepared.job_ids), now)
            case "refused":
                reason = f"the manager refused this VM: {message.refused.reason}"
                yield from self._leave(_Leaving(reason, 1, 0.0), 0.0, now)
            case None:
                pass  # a newer manager's message that this agent does not know

    # ------------------------------------------------------------ commands

    def _launch(self, launch: agent_pb2.Launch, now: float) -> Iterator[Instruction]:
        if self._launched.get(launch.job_id) == launch.generation == self._seen.get(launch.job_id):
            return  # a repetition: its workers run, or their exits are reported
        refusal = self._refusal(launch, now)
        if refusal is not None:
            yield from self._reports.report(messages.refused(launch.job_id, launch.generation, refusal))
            return
        self._launched[launch.job_id] = launch.generation
        yield from self._see(launch.job_id, launch.generation)
        reason = f"generation {launch.generation} takes its place"
        yield from self._workers.end(
            lambda worker: worker.key.job_id == launch.job_id,
            agent_pb2.STOP_MODE_LEAVE_NOW,
            self._timings.supersede_grace_s,
            reason,
            now,
        )
        yield from self._admit(launch, now)

    def _folder_prepared(self, event: Prepared, now: float) -> Iterator[Instruction]:
        if event.error and self._preparations.is_wanted(event.job_id):
            yield from self._reports.report(messages.setup_failed(event.job_id, event.exit_code, event.error))
        yield from self._prepare(self._preparations.finish(event.job_id, is_ready=not event.error), now)

    def _prepare(self, instructions: Iterator[Instruction], now: float) -> Iterator[Instruction]:
        """Follow what the preparations want done; the manager hears at once what that changes."""
        before = self._preparations.ready, self._preparations.unfinished
        yield from instructions
        if (self._preparations.ready, self._preparations.unfinished) != before:
            yield from self._send_heartbeat(now)

    def _send_heartbeat(self, now: float) -> Iterator[Instruction]:
        """Say how things are, without waiting for the next one to be due."""
        self._conversation.heartbeat_now(now)
        yield from self._tick(now)

    def _see(self, job_id: str, generation: int) -> Iterator[Instruction]:
        if generation <= self._seen.get(job_id, 0):
            return
        self._seen.pop(job_id, None)
        self._seen[job_id] = generation
        while len(self._seen) > _MAX_SEEN_JOBS:
            forgotten = next(iter(self._seen))
            del self._seen[forgotten]
            self._launched.pop(forgotten, None)
        yield Remember(dict(self._seen))

    def _refusal(self, launch: agent_pb2.Launch, now: float) -> str | None:
        """Why this Launch cannot be followed; None when it can."""
        newest = self._seen.get(launch.job_id, 0)
        vm_id = self.identity.vm_id
        if launch.generation <= newest:
            return f"generation {launch.generation} is over: VM {vm_id} has seen generation {newest} of the job"
        if self._no_launches:
            return f"VM {vm_id} takes no launches: {self._no_launches}"
        if self._conversation.is_lease_over(now):
            return f"VM {vm_id} has no lease: no heartbeat was acknowledged for {self._conversation.lease_s:g} s"
        return flaw_of(launch, self.identity) or device_in_use(launch, self.workers)

    def _admit(self, launch: agent_pb2.Launch, now: float) -> Iterator[Instruction]:
        ranks = sorted(assignment.rank for assignment in launch.workers)
        has_rank_0 = bool(ranks) and ranks[0] == 0
        workers = [
            new_worker(launch, assignment, self.identity.device, reports_steps=assignment.rank == ranks[0])
            for assignment in launch.workers
        ]
        if has_rank_0 and launch.rendezvous_port != self._rendezvous_port:
            reason = (
                f"rendezvous port stale: the launch says {launch.rendezvous_port}, "
                f"VM {self.identity.vm_id} holds {self._rendezvous_port} now"
            )
            for worker in workers:
                exited = worker.never_ran(agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED, reason)
                yield from self._reports.report(agent_pb2.Report(worker_exited=exited))
            return
        if has_rank_0:
            self._rendezvous_port = 0  # spoken for; RendezvousOpened tells the next
            yield ClaimRendezvous(launch.rendezvous_port)
        yield from self._workers.add(workers, now)

    def _stop(self, stop: agent_pb2.Stop, now: float) -> Iterator[Instruction]:
        """End the generation, and older ones of the job: stopping never does harm, so it is never refused.

        Where nothing of it is here, its Launch may have been lost on the way. It would be refused from now on, and the
        manager must hear that, or it would wait for ever for the ends of workers that never were.
        """
        key = (stop.job_id, stop.generation)
        if all(worker.key.generation_key != key for worker in self.workers):
            reason = f"generation {stop.generation} was stopped, and nothing of it runs on VM {self.identity.vm_id}"
            yield from self._reports.report(messages.refused(stop.job_id, stop.generation, reason))
        yield from self._see(stop.job_id, stop.generation)
        yield from self._workers.end(
            lambda worker: worker.key.job_id == stop.job_id and worker.key.generation <= stop.generation,
            stop.mode or agent_pb2.STOP_MODE_LEAVE_NOW,
            stop.grace_s,
            "the manager stopped the generation",
            now,
        )

    def _drain(self, reason: str, now: float) -> Iterator[Instruction]:
        reason = f"draining: {reason or 'the manager said so'}"
        self._no_launches = self._no_launches or reason
        self._leaving = self._leaving or _Leaving(reason, 0, self._timings.drain_linger_s)
        yield from self._workers.cancel_waiting(reason, now)

    def _leave(self, leaving: _Leaving, grace_s: float, now: float) -> Iterator[Instruction]:
        """End all workers, then the agent."""
        self._no_launches = leaving.reason
        self._leaving = leaving
        self._exit_at = None
        yield from self._workers.end(
            lambda worker: True,
            agent_pb2.STOP_MODE_LEAVE_NOW,
            grace_s,
            leaving.reason,
            now,
            excuse=agent_pb2.EXIT_CAUSE_AGENT_ENDED,
        )

    # ------------------------------------------------------------ talking

    def _hello(self) -> agent_pb2.Hello:
        return messages.hello(
            self.identity, self.workers, self._seen, self._rendezvous_port, self._reports.outbox.first_report
        )

    def _notice_seen(self, notice: NoticeSeen) -> Iterator[Instruction]:
        if notice.notice_id in self._notices:
            return
        self._notices.add(notice.notice_id)
        yield from self._reports.report(
            agent_pb2.Report(
                preemption_notice=agent_pb2.PreemptionNotice(
                    notice_id=clean_text(notice.notice_id, NAME_CHARS),
                    seconds_left=notice.seconds_left,
                    source=clean_text(notice.source, NAME_CHARS),
                )
            )
        )

    # ------------------------------------------------------------ time

    def _enforce_lease(self, now: float) -> Iterator[Instruction]:
        if self._conversation.is_lease_over(now):
            reason = f"the lease is over: nothing was heard from the manager for {self._conversation.lease_s:g} s"
            yield from self._workers.end(
                lambda worker: True,
                agent_pb2.STOP_MODE_LEAVE_NOW,
                0.0,
                reason,
                now,
                excuse=agent_pb2.EXIT_CAUSE_LEASE_OVER,
            )

    def _tick(self, now: float) -> Iterator[Instruction]:
        yield from self._workers.kill_overdue(now)
        if self._conversation.is_silent(now):
            self._conversation.closed()
            yield HangUp(f"nothing came from the manager for {self._conversation.silence_s:g} s")
        if self._conversation.is_heartbeat_due(now):
            yield from self._reports.steps()
            heartbeat = agent_pb2.Heartbeat(
                sequence=self._conversation.next_sequence(now),
                rendezvous_port=self._rendezvous_port,
                workers=[worker.health for worker in self.workers],
                preparing_jobs=sorted(self._preparing),
                warm_jobs=sorted(self._warm),
                prepared_jobs=sorted(self._preparations.ready),
                setting_up_jobs=sorted(self._preparations.unfinished),
            )
            yield Send(agent_pb2.AgentMessage(heartbeat=heartbeat))

    def _exit_when_done(self, now: float) -> Iterator[Instruction]:
        """An agent that is to leave goes when nothing runs and its reports are stored, or after lingering for that."""
        if self._leaving is None or self.workers or self._has_exited:
            return
        if self._exit_at is None:
            self._exit_at = now + self._leaving.linger_s
        if self._reports.outbox.is_empty or now >= self._exit_at:
            self._has_exited = True
            yield ExitAgent(self._leaving.code, self._leaving.reason)
