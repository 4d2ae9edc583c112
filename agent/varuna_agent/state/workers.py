"""The workers of a VM: which run, which wait for a device, how each is brought to its end, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from varuna_agent.state import messages
from varuna_agent.state.reports import Reports
from varuna_agent.state.stimuli import (
    AdmitWorker,
    Instruction,
    KillWorker,
    ReadStacks,
    ReleaseRendezvous,
    Send,
    TellWorkerToLeave,
    WorkerKey,
)
from varuna_agent.state.worker import Excuse, Phase, Stimulus, Worker
from varuna_proto.bounds import ERROR_CHARS, clean_text
from varuna_proto.v1 import agent_pb2, worker_pb2


class Workers:
    """Part of `AgentState`: every method returns what is to be done, in order.

    Args:
        device: `cpu` or `cuda`: what a worker on its way out still keeps from the next one.
    """

    def __init__(self, device: str, reports: Reports) -> None:
        self._device = device
        self._reports = reports
        self._by_key: dict[WorkerKey, Worker] = {}

    # ------------------------------------------------------------ asking

    @property
    def all(self) -> tuple[Worker, ...]:
        return tuple(self._by_key.values())

    @property
    def run(self) -> bool:
        """Whether any may still run by itself."""
        return any(worker.phase is not Phase.KILLED for worker in self._by_key.values())

    def expects(self, key: WorkerKey) -> bool:
        """Whether a worker that says it is `key` may connect."""
        worker = self._by_key.get(key)
        return worker is not None and worker.has_process and not worker.has_connected

    def deadlines(self) -> list[float]:
        """When the next are to be killed."""
        return [worker.kill_at for worker in self._by_key.values() if worker.kill_at is not None]

    # ------------------------------------------------------------ starting

    def add(self, workers: Iterable[Worker], now: float) -> Iterator[Instruction]:
        """They start as soon as their devices are free."""
        for worker in workers:
            worker.accepted(now)
            self._by_key[worker.key] = worker
        yield from self._start_waiting(now)

    def _start_waiting(self, now: float) -> Iterator[Instruction]:
        """Start the generations whose devices are free and whose older generations have ended, or do so apart."""
        running = [
            worker for worker in self._by_key.values() if worker.has_process and worker.holds_device(self._device)
        ]
        waiting = [worker for worker in self._by_key.values() if worker.phase is Phase.WAITING]
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

    # ------------------------------------------------------------ ending

    def end(
        self,
        concerned: Callable[[Worker], bool],
        mode: agent_pb2.StopMode.ValueType,
        grace_s: float,
        reason: str,
        now: float,
        *,
        excuse: agent_pb2.ExitCause.ValueType | None = None,
    ) -> Iterator[Instruction]:
        """Those that are `concerned` have `grace_s` to leave; 0: they are killed.

        `excuse`: the cause of their exits, where neither the manager nor the job is the reason.
        """
        for worker in self.all:
            if concerned(worker):
                if excuse is not None and worker.excuse is None:
                    worker.excuse = Excuse(excuse, reason)
                yield from self._end_one(worker, mode, grace_s, reason, now)

    def kill_overdue(self, now: float) -> Iterator[Instruction]:
        """Those that had their time to leave."""
        for worker in self.all:
            if worker.kill_at is not None and now >= worker.kill_at:
                yield from self._kill(worker, worker.end_reason, now)

    def cancel_waiting(self, reason: str, now: float) -> Iterator[Instruction]:
        for worker in self.all:
            if worker.phase is Phase.WAITING:
                worker.excuse = Excuse(agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED, reason)
                yield from self._cancel(worker, reason, now)

    def process_ended(self, key: WorkerKey, exit_code: int, log_tail: str, now: float) -> Iterator[Instruction]:
        worker = self._by_key[key]
        yield from self._gone(worker, worker.exited(exit_code, log_tail, now), Stimulus.EXIT, now)

    def process_not_started(self, key: WorkerKey, reason: str, now: float) -> Iterator[Instruction]:
        worker = self._by_key[key]
        exited = worker.never_ran(agent_pb2.EXIT_CAUSE_LAUNCH_FAILED, reason)
        yield from self._gone(worker, exited, Stimulus.EXIT, now)

    def _end_one(
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
                saves = mode == agent_pb2.STOP_MODE_SAVE_FIRST and worker.connected
                worker.saving_since = now if saves else None
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
        cause = agent_pb2.EXIT_CAUSE_GENERATION_ENDED if worker.excuse is None else worker.excuse.cause
        exited = worker.never_ran(cause, f"{reason}; it had not started yet")
        yield from self._gone(worker, exited, Stimulus.CANCEL, now)

    def _gone(
        self, worker: Worker, exited: agent_pb2.WorkerExited, stimulus: Stimulus, now: float
    ) -> Iterator[Instruction]:
        worker.move(stimulus, now)
        worker.kill_at = None
        del self._by_key[worker.key]
        yield from self._reports.steps(even_if_full=True)  # what it did comes before its end
        yield from self._reports.report(agent_pb2.Report(worker_exited=exited))
        if stimulus is Stimulus.EXIT:  # a cancelled worker held no device, and the rest of its generation goes as well
            yield from self._start_waiting(now)

    # ------------------------------------------------------------ what they say

    def connected(self, key: WorkerKey, pid: int, now: float) -> Iterator[Instruction]:
        worker = self._by_key[key]
        worker.move(Stimulus.HELLO, now)
        worker.connected = worker.has_connected = True
        worker.pid = pid
        if worker.start.environment.secret:
            yield AdmitWorker(key, worker.start.environment.secret)
        if worker.phase is Phase.LEAVING:
            yield TellWorkerToLeave(key, worker.leave_mode, "it was to leave before it had connected")

    def disconnected(self, key: WorkerKey) -> None:
        if key in self._by_key:
            self._by_key[key].connected = False

    def said(self, key: WorkerKey, message: worker_pb2.WorkerMessage, now: float) -> Iterator[Instruction]:
        worker = self._by_key.get(key)
        if worker is None:
            return
        match message.WhichOneof("body"):
            case "ready":
                worker.move(Stimulus.READY, now)
                worker.health.step = message.ready.resumed_step
                yield from self._reports.report(messages.started(worker, message.ready))
            case "step_done":
                yield from self._step_done(worker, message.step_done)
            case "evaluated":
                worker.health.evaluated = message.evaluated.micro_batches
            case "step_traced":
                if self._reports.are_heard:  # the next one will do as well: none is kept for later
                    yield from self._reports.report(messages.traced(worker.key, message.step_traced))
            case "checkpoint_done":
                # Nobody does the steps before it again: their losses must not be lost with this VM.
                yield from self._reports.steps(even_if_full=True)
                yield from self._reports.report(messages.committed(worker.key, message.checkpoint_done))
            case "profile_done":
                yield from self._reports.report(messages.measured(worker.key, message.profile_done))
            case "unreached":
                worker.unreached = message.unreached
            case "failure":
                worker.failure = clean_text(message.failure.traceback, ERROR_CHARS)
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
        result = agent_pb2.StepResult(
            step=done.step, loss=done.loss, step_us=done.step_us, examples=done.examples, skipped=done.skipped
        )
        self._reports.add_step(worker.key, result)
        if not worker.has_reported_step:
            worker.has_reported_step = True  # the generation makes progress: the manager waits for this one
            if self._reports.are_heard:
                yield from self._reports.steps()

    def dump_stacks(self, request: agent_pb2.DumpStacks) -> Iterator[Instruction]:
        for worker in self.all:
            if worker.key.generation_key != (request.job_id, request.generation):
                continue
            if worker.has_process:
                yield ReadStacks(request.request_id, worker.key, worker.pid)
                continue
            error = "it has not started: its device is still in use"
            yield Send(messages.stack_dump(request.request_id, worker.key, error=error))
