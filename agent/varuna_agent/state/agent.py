"""The agent's state machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from varuna_agent.state import messages
from varuna_agent.state.admission import Identity, device_in_use, flaw_of, new_worker
from varuna_agent.state.conversation import Conversation
from varuna_agent.state.outbox import Outbox
from varuna_agent.state.stimuli import (
    ClaimRendezvous,
    Event,
    ExitAgent,
    HangUp,
    Instruction,
    KillWorker,
    ManagerSaid,
    NoticeSeen,
    Prepare,
    Preparing,
    ProcessEnded,
    ProcessNotStarted,
    ReadLogs,
    ReadStacks,
    ReleaseRendezvous,
    Remember,
    RendezvousOpened,
    Send,
    StreamClosed,
    StreamOpened,
    TellWorkerToLeave,
    Terminate,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
    WorkerKey,
    WorkerSaid,
)
from varuna_agent.state.worker import Phase, Stimulus, Worker
from varuna_proto.v1 import agent_pb2, worker_pb2


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
        self._outbox = Outbox()
        self._workers: dict[WorkerKey, Worker] = {}
        self._seen = dict(seen or {})  # newest generation of each job, launched here or not; the last seen at the end
        self._launched: dict[str, int] = {}
        self._rendezvous_port = 0
        self._preparing: frozenset[str] = frozenset()
        self._notices: set[str] = set()
        self._no_launches = ""
        self._leaving: _Leaving | None = None
        self._exit_at: float | None = None
        self._has_exited = False

    # ------------------------------------------------------------ asking

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    @property
    def unacknowledged(self) -> tuple[agent_pb2.Report, ...]:
        return self._outbox.unacknowledged

    def expects(self, key: WorkerKey) -> bool:
        """Whether a worker that says it is `key` may connect."""
        worker = self._workers.get(key)
        return worker is not None and worker.has_process and not worker.has_connected

    def next_deadline(self) -> float | None:
        """When to send the next Tick, if nothing else happens before."""
        deadlines = list(self._conversation.deadlines())
        deadlines += [worker.kill_at for worker in self._workers.values() if worker.kill_at is not None]
        runs = any(worker.phase is not Phase.KILLED for worker in self._workers.values())
        if runs and self._conversation.lease_ends_at is not None:
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
            case WorkerSaid(key, _):
                if key in self._workers:
                    yield from self._worker_said(self._workers[key], event, now)
            case WorkerConnected(key, pid):
                yield from self._worker_connected(key, pid, now)
            case WorkerDisconnected(key):
                if key in self._workers:
                    self._workers[key].connected = False
            case ProcessEnded(key, exit_code, log_tail):
                worker = self._workers[key]
                yield from self._gone(worker, worker.exited(exit_code, log_tail), Stimulus.EXIT, now)
            case ProcessNotStarted(key, reason):
                worker = self._workers[key]
                exited = worker.never_ran(agent_pb2.EXIT_CAUSE_LAUNCH_FAILED, reason)
                yield from self._gone(worker, exited, Stimulus.EXIT, now)
            case RendezvousOpened(port):
                self._rendezvous_port = port
                self._conversation.heartbeat_now(now)
                yield from self._tick(now)
            case NoticeSeen():
                yield from self._notice_seen(event)
            case StreamOpened():
                self._conversation.opened(now)
                yield Send(agent_pb2.AgentMessage(hello=self._hello()))
            case StreamClosed():
                self._conversation.closed()
            case Tick():
                yield from self._tick(now)
            case Preparing(job_ids):
                self._preparing = job_ids
                self._conversation.heartbeat_now(now)
                yield from self._tick(now)
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
                yield from self._send_everything_again()
                yield from self._tick(now)
            case "ack":
                self._conversation.acknowledged(message.ack.heartbeat_sequence)
                self._outbox.acknowledge(message.ack.reports_through)
            case "launch":
                yield from self._launch(message.launch, now)
            case "stop":
                yield from self._stop(message.stop, now)
            case "drain":
                yield from self._drain(message.drain.reason, now)
            case "fetch_logs":
                yield ReadLogs(message.fetch_logs)
            case "dump_stacks":
                yield from self._dump_stacks(message.dump_stacks)
            case "prepare":
                if not self._no_launches:
                    yield Prepare(message.prepare)
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
            yield from self._report(
                agent_pb2.Report(
                    command_refused=agent_pb2.CommandRefused(
                        job_id=launch.job_id, generation=launch.generation, reason=refusal
                    )
                )
            )
            return
        self._launched[launch.job_id] = launch.generation
        yield from self._see(launch.job_id, launch.generation)
        reason = f"generation {launch.generation} takes its place"
        yield from self._end_workers(
            lambda worker: worker.key.job_id == launch.job_id,
            agent_pb2.STOP_MODE_LEAVE_NOW,
            self._timings.supersede_grace_s,
            reason,
            now,
        )
        yield from self._admit(launch, now)

    def _see(self, job_id: str, generation: int) -> Iterator[Instruction]:
        if generation <= self._seen.get(job_id, 0):
            return
        self._seen.pop(job_id, None)
        self._seen[job_id] = generation
        while len(self._seen) > _MAX_SEEN_JOBS:
            del self._seen[next(iter(self._seen))]
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
        return flaw_of(launch, self.identity) or device_in_use(launch, self._workers.values())

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
                exited = worker.never_ran(agent_pb2.EXIT_CAUSE_LAUNCH_FAILED, reason)
                yield from self._report(agent_pb2.Report(worker_exited=exited))
            return
        if has_rank_0:
            self._rendezvous_port = 0  # spoken for; RendezvousOpened tells the next
            yield ClaimRendezvous(launch.rendezvous_port)
        self._workers.update((worker.key, worker) for worker in workers)
        yield from self._start_waiting(now)

    def _start_waiting(self, now: float) -> Iterator[Instruction]:
        """Start the generations whose devices are free and whose older generations have ended, or do so apart."""
        kind = self.identity.device
        running = [worker for worker in self._workers.values() if worker.has_process and worker.holds_device(kind)]
        waiting = [worker for worker in self._workers.values() if worker.phase is Phase.WAITING]
        devices = {worker.local_rank for worker in running}
        blocked = {w.key.generation_key for w in waiting if w.local_rank in devices}
        blocked |= {
            w.key.generation_key
            for w in waiting
            if any(r.key.job_id == w.key.job_id and r.key.generation != w.key.generation for r in running)
        }
        for worker in waiting:
            if worker.key.generation_key not in blocked:
                worker.move(Stimulus.START, now)
                yield worker.start

    def _stop(self, stop: agent_pb2.Stop, now: float) -> Iterator[Instruction]:
        """End the generation, and older ones of the job: stopping never does harm, so it is never refused."""
        yield from self._see(stop.job_id, stop.generation)
        yield from self._end_workers(
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
        for worker in self.workers:
            if worker.phase is Phase.WAITING:
                yield from self._cancel(worker, reason, now)

    def _leave(self, leaving: _Leaving, grace_s: float, now: float) -> Iterator[Instruction]:
        """End all workers, then the agent."""
        self._no_launches = leaving.reason
        self._leaving = leaving
        self._exit_at = None
        yield from self._end_workers(lambda worker: True, agent_pb2.STOP_MODE_LEAVE_NOW, grace_s, leaving.reason, now)

    # ------------------------------------------------------------ ending workers

    def _end_workers(
        self,
        concerned: Callable[[Worker], bool],
        mode: agent_pb2.StopMode.ValueType,
        grace_s: float,
        reason: str,
        now: float,
    ) -> Iterator[Instruction]:
        for worker in self.workers:
            if concerned(worker):
                yield from self._end(worker, mode, grace_s, reason, now)

    def _end(
        self, worker: Worker, mode: agent_pb2.StopMode.ValueType, grace_s: float, reason: str, now: float
    ) -> Iterator[Instruction]:
        """Ask the worker to leave, and set when it is killed. Asking again only ever brings its end forward."""
        if worker.phase is Phase.WAITING:
            yield from self._cancel(worker, reason, now)
        elif worker.phase is Phase.KILLED:
            pass
        elif grace_s <= 0 or (mode == agent_pb2.STOP_MODE_LEAVE_NOW and not worker.has_connected):
            yield from self._kill(worker, reason, now)
        else:
            is_more_urgent = worker.leave_mode not in (mode, agent_pb2.STOP_MODE_LEAVE_NOW)
            worker.move(Stimulus.LEAVE, now)
            kill_at = now + grace_s
            if worker.kill_at is None or kill_at < worker.kill_at:
                worker.kill_at = kill_at
                worker.end_reason = f"{reason}; it had not left after {grace_s:g} s and was killed"
            if is_more_urgent:
                worker.leave_mode = mode
                if worker.connected:
                    yield TellWorkerToLeave(worker.key, mode, reason)

    def _kill(self, worker: Worker, reason: str, now: float) -> Iterator[Instruction]:
        worker.move(Stimulus.KILL, now)
        worker.kill_at = None
        worker.end_reason = reason
        yield KillWorker(worker.key, reason)

    def _cancel(self, worker: Worker, reason: str, now: float) -> Iterator[Instruction]:
        if worker.start.rendezvous_port:
            yield ReleaseRendezvous(worker.start.rendezvous_port)
        exited = worker.never_ran(agent_pb2.EXIT_CAUSE_GENERATION_ENDED, f"{reason}; it had not started yet")
        yield from self._gone(worker, exited, Stimulus.CANCEL, now)

    def _gone(
        self, worker: Worker, exited: agent_pb2.WorkerExited, stimulus: Stimulus, now: float
    ) -> Iterator[Instruction]:
        worker.move(stimulus, now)
        worker.kill_at = None
        del self._workers[worker.key]
        yield from self._send_steps(even_if_full=True)  # what it did comes before its end
        yield from self._report(agent_pb2.Report(worker_exited=exited))
        if stimulus is Stimulus.EXIT:  # a cancelled worker held no device, and the rest of its generation goes as well
            yield from self._start_waiting(now)

    # ------------------------------------------------------------ workers

    def _worker_connected(self, key: WorkerKey, pid: int, now: float) -> Iterator[Instruction]:
        worker = self._workers[key]
        worker.move(Stimulus.HELLO, now)
        worker.connected = worker.has_connected = True
        worker.pid = pid
        if worker.phase is Phase.LEAVING:
            yield TellWorkerToLeave(key, worker.leave_mode, "it was to leave before it had connected")

    def _worker_said(self, worker: Worker, event: WorkerSaid, now: float) -> Iterator[Instruction]:
        message = event.message
        match message.WhichOneof("body"):
            case "ready":
                worker.move(Stimulus.READY, now)
                worker.health.step = message.ready.resumed_step
                yield from self._report(messages.started(worker, message.ready))
            case "step_done":
                yield from self._step_done(worker, message.step_done)
            case "evaluated":
                worker.health.evaluated = message.evaluated.micro_batches
            case "checkpoint_done":
                # Nobody does the steps before it again: their losses must not be lost with this VM.
                yield from self._send_steps(even_if_full=True)
                yield from self._report(messages.committed(worker.key, message.checkpoint_done))
            case "profile_done":
                yield from self._report(messages.measured(worker.key, message.profile_done))
            case "failure":
                worker.failure = message.failure.traceback
                worker.failed_before_leave = worker.phase in (Phase.CONNECTED, Phase.READY)
            case _:
                pass  # a second hello, or a newer library's message

    def _step_done(self, worker: Worker, done: worker_pb2.StepDone) -> Iterator[Instruction]:
        health = worker.health
        health.step = done.step
        health.forward_us, health.backward_us = done.forward_us, done.backward_us
        health.wait_us, health.memory_bytes = done.wait_us, done.memory_bytes
        if not worker.reports_steps:
            return
        result = agent_pb2.StepResult(step=done.step, loss=done.loss, step_us=done.step_us, examples=done.examples)
        self._outbox.add_step(worker.key.job_id, worker.key.generation, result)
        if not worker.has_reported_step:
            worker.has_reported_step = True  # the generation makes progress: the manager waits for this one
            if self._conversation.is_welcome:
                yield from self._send_steps()

    def _dump_stacks(self, request: agent_pb2.DumpStacks) -> Iterator[Instruction]:
        for worker in self.workers:
            if worker.key.generation_key != (request.job_id, request.generation):
                continue
            if worker.has_process:
                yield ReadStacks(request.request_id, worker.key, worker.pid)
                continue
            error = "it has not started: its device is still in use"
            yield Send(messages.stack_dump(request.request_id, worker.key, error=error))

    # ------------------------------------------------------------ talking

    def _hello(self) -> agent_pb2.Hello:
        return messages.hello(
            self.identity, self._workers.values(), self._seen, self._rendezvous_port, self._outbox.first_report
        )

    def _report(self, report: agent_pb2.Report) -> Iterator[Instruction]:
        self._outbox.add(report)
        if self._conversation.is_welcome:
            yield Send(messages.report(report))

    def _send_steps(self, *, even_if_full: bool = False) -> Iterator[Instruction]:
        for report in self._outbox.take_steps(even_if_full=even_if_full):
            if self._conversation.is_welcome:
                yield Send(messages.report(report))

    def _send_everything_again(self) -> Iterator[Instruction]:
        for report in self._outbox.unacknowledged:
            yield Send(messages.report(report))

    def _notice_seen(self, notice: NoticeSeen) -> Iterator[Instruction]:
        if notice.notice_id in self._notices:
            return
        self._notices.add(notice.notice_id)
        yield from self._report(
            agent_pb2.Report(
                preemption_notice=agent_pb2.PreemptionNotice(
                    notice_id=notice.notice_id, seconds_left=notice.seconds_left, source=notice.source
                )
            )
        )

    # ------------------------------------------------------------ time

    def _enforce_lease(self, now: float) -> Iterator[Instruction]:
        if self._conversation.is_lease_over(now):
            reason = f"the lease is over: nothing was heard from the manager for {self._conversation.lease_s:g} s"
            yield from self._end_workers(lambda worker: True, agent_pb2.STOP_MODE_LEAVE_NOW, 0.0, reason, now)

    def _tick(self, now: float) -> Iterator[Instruction]:
        for worker in self.workers:
            if worker.kill_at is not None and now >= worker.kill_at:
                yield from self._kill(worker, worker.end_reason, now)
        if self._conversation.is_silent(now):
            self._conversation.closed()
            yield HangUp(f"nothing came from the manager for {self._conversation.silence_s:g} s")
        if self._conversation.is_heartbeat_due(now):
            yield from self._send_steps()
            heartbeat = agent_pb2.Heartbeat(
                sequence=self._conversation.next_sequence(now),
                rendezvous_port=self._rendezvous_port,
                workers=[worker.health for worker in self._workers.values()],
                preparing_jobs=sorted(self._preparing),
            )
            yield Send(agent_pb2.AgentMessage(heartbeat=heartbeat))

    def _exit_when_done(self, now: float) -> Iterator[Instruction]:
        """An agent that is to leave goes when nothing runs and its reports are stored, or after lingering for that."""
        if self._leaving is None or self._workers or self._has_exited:
            return
        if self._exit_at is None:
            self._exit_at = now + self._leaving.linger_s
        if self._outbox.is_empty or now >= self._exit_at:
            self._has_exited = True
            yield ExitAgent(self._leaving.code, self._leaving.reason)
