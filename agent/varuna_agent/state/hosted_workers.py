"""The workers of a VM: starts them when their devices are free, ends them, and handles their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hmac import compare_digest

from varuna_agent.state import messages
from varuna_agent.state.hosted_worker import ExitExcuse, HostedWorker, WorkerPhase, WorkerStimulus
from varuna_agent.state.instructions import (
    AdmitWorker,
    AssignWorker,
    Instruction,
    KillWorker,
    ReadStacks,
    ReleaseRendezvousPort,
    SendAheadPart,
    SendLeave,
    SendMessage,
    SendStore,
)
from varuna_agent.state.kept_memories import KeptMemories, KeptMemory
from varuna_agent.state.newcomers import HostedNewcomer, HostedNewcomers
from varuna_agent.state.reporter import Reporter
from varuna_agent.state.survivors import Survivor, Survivors
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.bounds import ERROR_CHARS, NAME_CHARS, clean_text
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST
from varuna_proto.state_use import StateUse
from varuna_proto.v1 import agent_pb2, worker_pb2

_NO_USE = StateUse()
_MOST_QUIET = 64
_MOST_COPIES = 4096
"""Bounds on the ranks that a worker names as quiet, of which one is enough, and on the copies that it says it has. Its
health is in each heartbeat, and the manager ends the stream of an agent whose heartbeats are too large."""


class HostedWorkers:
    """Part of `AgentState`: its methods return the instructions to carry out, in order.

    Args:
        device: `cpu` or `cuda`; it decides whether a leaving worker still holds its device.
        keep_survivors_s: how long a process that has left its generation waits for its next rank, or gives its state;
            0: none stays.
        assignment_s: how long a survivor may take to connect with its new rank.
        answer_s: how long it may take to begin to give its state.
        keep_memory_s: how long what a worker has left in memory waits for a generation that takes it.
        store_s: how long a worker that has left its generation may take to put its state there.
    """

    def __init__(
        self,
        device: str,
        reports: Reporter,
        *,
        keep_survivors_s: float,
        assignment_s: float,
        answer_s: float,
        keep_memory_s: float,
        store_s: float,
    ) -> None:
        self._device = device
        self._reports = reports
        self._survivors = Survivors(
            device, keep_s=keep_survivors_s, answer_s=answer_s, store_s=store_s if keep_memory_s > 0 else 0.0
        )
        self._newcomers = HostedNewcomers(device)
        self._memories = KeptMemories(keep_memory_s)
        self._assignment_s = assignment_s
        self._store_s = store_s
        self._by_key: dict[WorkerKey, HostedWorker] = {}

    # ------------------------------------------------------------ queries

    @property
    def all(self) -> tuple[HostedWorker, ...]:
        return tuple(self._by_key.values())

    @property
    def survivors(self) -> tuple[Survivor, ...]:
        return self._survivors.all

    @property
    def newcomers(self) -> tuple[HostedNewcomer, ...]:
        return self._newcomers.all

    @property
    def memories(self) -> tuple[KeptMemory, ...]:
        return self._memories.all

    def may_store(self, key: WorkerKey, secret: str) -> bool:
        """Whether a process that presents itself as that worker may leave its state in memory."""
        worker = self._by_key.get(key)
        is_running = worker is not None and worker.has_connected and worker.phase is not WorkerPhase.KILLED
        return (is_running and self._knows_secret(key, secret)) or self._survivors.may_store(key, secret)

    def list_memories(self, key: WorkerKey, secret: str) -> list[WorkerKey]:
        """The workers whose memory a process that presents itself as worker `key` gives to its generation."""
        return self._memories.list_taken_by(key) if self._knows_secret(key, secret) else []

    def _knows_secret(self, key: WorkerKey, secret: str) -> bool:
        worker = self._by_key.get(key)
        return worker is not None and compare_digest(worker.start.environment.secret.encode(), secret.encode())

    @property
    def has_running(self) -> bool:
        """Whether there is a worker, a survivor or a newcomer that was not killed."""
        return (
            any(worker.phase is not WorkerPhase.KILLED for worker in self._by_key.values())
            or any(not survivor.is_killed for survivor in self._survivors.all)
            or self._newcomers.are_running
        )

    @property
    def have_processes(self) -> bool:
        """Whether there is a process, or a worker that is to get one."""
        return bool(self._by_key or self._survivors.all) or any(one.has_process for one in self._newcomers.all)

    def make_newcomer_statuses(self) -> list[agent_pb2.Newcomer]:
        """For the heartbeat."""
        return self._newcomers.make_statuses()

    def has_worker(self, key: WorkerKey) -> bool:
        return key in self._by_key

    def is_expected(self, key: WorkerKey) -> bool:
        """Whether a worker that presents itself as `key` may connect."""
        worker = self._by_key.get(key)
        if worker is None:
            return self._newcomers.is_expected(key)
        return worker.has_process and not worker.has_connected

    def list_deadlines(self) -> list[float]:
        """The times at which leaving workers, survivors, and survivors that do not take their rank are to be killed."""
        times = (at for worker in self._by_key.values() for at in (worker.kill_at, worker.connect_by))
        deadlines = [*self._survivors.list_deadlines(), *self._memories.list_deadlines()]
        return [*(at for at in times if at is not None), *deadlines]

    def get_held(self, worker: HostedWorker) -> agent_pb2.HeldState | None:
        """What the survivor on the worker's device holds, if the worker is to start in it; None: there is none."""
        survivor = self._survivors.get_survivor(worker.key.job_id, worker.local_rank) if worker.is_in_place else None
        return None if survivor is None else survivor.held

    # ------------------------------------------------------------ starting

    def add_workers(
        self, launch: agent_pb2.Launch, workers: Iterable[HostedWorker], now: float
    ) -> Iterator[Instruction]:
        """Accept workers; they start as soon as their devices are free, in place as soon as the survivors are there."""
        workers = list(workers)
        yield from self._survivors.make_room(launch, now)
        yield from self._newcomers.make_room(launch, workers)
        yield from self._memories.make_room(launch, [worker.key for worker in workers], now)
        for worker in workers:
            worker.start_clock(now)
            self._by_key[worker.key] = worker
        yield from self._save_unkept(f"generation {launch.generation} of job {launch.job_id} needs its device", now)
        yield from self._start_waiting(now)

    def _start_waiting(self, now: float) -> Iterator[Instruction]:
        """Start the generations whose devices are free and whose job has no worker of another generation left."""
        yield from self._assign_survivors(now)
        running = [
            worker for worker in self._by_key.values() if worker.has_process and worker.holds_device(self._device)
        ]
        waiting = [w for w in self._by_key.values() if w.phase is WorkerPhase.WAITING and not w.is_in_place]
        devices = {worker.local_rank for worker in running} | self._survivors.used_devices
        blocked = {w.key.generation_key for w in waiting if w.local_rank in devices}
        blocked |= {
            w.key.generation_key
            for w in waiting
            if any(r.key.job_id == w.key.job_id and r.key.generation != w.key.generation for r in running)
        }
        for worker in waiting:
            if worker.key.generation_key not in blocked:
                worker.apply_stimulus(WorkerStimulus.START, now)
                newcomer = self._newcomers.take_newcomer(worker)
                if newcomer is None:
                    yield worker.start
                else:
                    worker.was_newcomer, worker.connect_by = True, now + self._assignment_s
                    yield AssignWorker(newcomer.key, worker.start)

    def _assign_survivors(self, now: float) -> Iterator[Instruction]:
        """Start waiting workers in the processes that are there for them; refuse those for which none can come."""
        for worker in self.all:
            if worker.phase is not WorkerPhase.WAITING or not worker.is_in_place:
                continue
            survivor = self._survivors.get_survivor(worker.key.job_id, worker.local_rank)
            if survivor is not None:
                self._survivors.remove_survivor(survivor.key)
                worker.apply_stimulus(WorkerStimulus.START, now)
                worker.connect_by = now + self._assignment_s
                yield AssignWorker(survivor.key, worker.start)
            elif not any(other.leaves_survivor_for(worker) for other in self._by_key.values()):
                reason = f"no process on device {worker.local_rank} holds the state of job {worker.key.job_id}"
                worker.excuse = ExitExcuse(agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED, reason)
                yield from self._cancel_worker(worker, reason, now)

    # ------------------------------------------------------------ ending

    def end_workers(
        self,
        is_concerned: Callable[[HostedWorker], bool],
        mode: agent_pb2.StopMode.ValueType,
        grace_s: float,
        *,
        reason: str,
        now: float,
        excuse: agent_pb2.ExitCause.ValueType | None = None,
        state_use: StateUse = _NO_USE,
    ) -> Iterator[Instruction]:
        """Give the workers for which `is_concerned` holds `grace_s` to leave; 0: kill them.

        Args:
            excuse: the cause of their exits, when neither the manager nor the job is the reason.
            state_use: what becomes of their state.
        """
        for worker in self.all:
            if is_concerned(worker):
                if excuse is not None and worker.excuse is None:
                    worker.excuse = ExitExcuse(excuse, reason)
                worker.may_stay, worker.state_use = worker.may_stay and state_use.keep, state_use
                yield from self._end_worker(worker, mode, grace_s, reason=reason, now=now)
        yield from self._start_waiting(now)

    def keep_survivors_longer(self, job_id: str, generation: int, seconds: float) -> None:
        self._survivors.keep_longer(job_id, generation, seconds)

    def end_survivors(self, is_concerned: Callable[[Survivor], bool], reason: str) -> Iterator[Instruction]:
        yield from self._survivors.kill_survivors(is_concerned, reason)

    def free_memories(self, is_concerned: Callable[[KeptMemory], bool], reason: str) -> Iterator[Instruction]:
        yield from self._memories.free_memories(is_concerned, reason)

    def adopt_memory(self, key: WorkerKey, step: int, size: int, now: float) -> None:
        """The agent's process before this one kept it."""
        self._memories.add_memory(key, step, size, now)

    def handle_state_stored(self, key: WorkerKey, step: int, size: int, now: float) -> None:
        """The worker's exit reports it."""
        worker = self._by_key.get(key)
        memory = self._memories.add_memory(key, step, size, now)
        if worker is not None:
            worker.stored = memory.make_held()

    def start_newcomers(self, command: agent_pb2.StartNewcomers, flaw: str) -> Iterator[Instruction]:
        """Start processes ahead; `flaw`: why that is not possible."""
        yield from self._newcomers.start_all(command, flaw)

    def end_newcomers(self, is_concerned: Callable[[HostedNewcomer], bool], reason: str) -> Iterator[Instruction]:
        yield from self._newcomers.kill_newcomers(is_concerned, reason)

    def send_ahead(self, command: agent_pb2.SendAhead) -> Iterator[SendAheadPart]:
        """Tell the job's processes here what each sends or takes of the state while it trains."""
        next_ranks = {assignment.local_rank: assignment.rank for assignment in command.workers}
        generation_key = (command.job_id, command.generation)
        training = [one for one in self.all if one.key.generation_key == generation_key and one.is_connected]
        waiting = self._newcomers.list_at_door(command.job_id, command.request)
        processes: list[HostedWorker | HostedNewcomer] = [*training, *waiting]
        for process in processes:
            part = worker_pb2.AheadPart(
                command=command, rank=next_ranks.get(process.local_rank), processes=len(processes)
            )
            yield SendAheadPart(process.key, part)

    def keep_no_survivors(self, reason: str, now: float, *, store: bool = False) -> Iterator[Instruction]:
        """End all survivors and newcomers; no process stays from now on, and one that was to leave with its state
        saves it. `store`: survivors first put theirs into memory that outlives the agent."""
        yield from self._newcomers.kill_newcomers(lambda newcomer: True, reason)
        self._survivors.are_kept = False
        yield from self._save_unkept(reason, now)
        if store:
            yield from self._survivors.end_and_store(reason, now)
        else:
            yield from self._survivors.kill_survivors(lambda survivor: True, reason)

    def _save_unkept(self, reason: str, now: float) -> Iterator[Instruction]:
        """Ask the workers that were to leave with their state, and whose processes may not stay now, to save it."""
        for worker in self.all:
            holds_first = worker.leave_mode == agent_pb2.STOP_MODE_HOLD_FIRST
            if holds_first and worker.kill_at is not None and not self._may_leave_unsaved(worker):
                grace_s = worker.kill_at - now
                yield from self._end_worker(worker, agent_pb2.STOP_MODE_SAVE_FIRST, grace_s, reason=reason, now=now)

    def kill_overdue(self, now: float) -> Iterator[Instruction]:
        """Kill the workers whose time to leave, to take a rank or to wait for one is over."""
        for worker in self.all:
            if worker.kill_at is not None and now >= worker.kill_at:
                yield from self._kill_worker(worker, worker.end_reason, now)
            elif worker.connect_by is not None and now >= worker.connect_by:
                reason = f"its process did not take the rank within {self._assignment_s:g} s"
                worker.excuse = worker.excuse or ExitExcuse(agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED, reason)
                yield from self._kill_worker(worker, reason, now)
        hosted = {worker.key.generation_key for worker in self._by_key.values()}
        yield from self._survivors.end_overdue(hosted, now)
        yield from self._memories.free_overdue(hosted, now)
        yield from self._start_waiting(now)

    def cancel_waiting(self, reason: str, now: float) -> Iterator[Instruction]:
        for worker in self.all:
            if worker.phase is WorkerPhase.WAITING:
                worker.excuse = ExitExcuse(agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED, reason)
                yield from self._cancel_worker(worker, reason, now)

    def handle_process_end(self, key: WorkerKey, exit_code: int, log_tail: str, now: float) -> Iterator[Instruction]:
        if self._newcomers.is_newcomer(key):
            how = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
            last = log_tail.strip().splitlines()[-1:] or ["its log is empty"]
            self._newcomers.handle_process_end(key, f"it ended with {how} before Varuna(): {last[0]}")
            return
        if self._survivors.remove_survivor(key):
            yield from self._start_waiting(now)
            return
        worker = self._by_key.get(key)
        if worker is None:
            return  # a survivor that could not take its rank, because it had already ended: that rank was refused
        exited = worker.make_exit(exit_code if worker.left is None else worker.left.exit_code, log_tail, now)
        if worker.takes_process and worker.phase is WorkerPhase.STARTING:
            reason = f"its process ended with exit code {exit_code} before it took the rank"
            exited = worker.make_unstarted_exit(agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED, f"{log_tail}\n{reason}".strip())
        yield from self._remove_worker(worker, exited, WorkerStimulus.EXIT, now)

    def handle_failed_start(self, key: WorkerKey, reason: str, now: float) -> Iterator[Instruction]:
        if self._newcomers.is_newcomer(key):
            self._newcomers.handle_process_end(key, reason)
            return
        worker = self._by_key.get(key)
        if worker is None:  # a survivor: how it has ended could not be found out, and does not matter
            if self._survivors.remove_survivor(key):
                yield from self._start_waiting(now)
            return
        cause = agent_pb2.EXIT_CAUSE_LAUNCH_REFUSED if worker.takes_process else agent_pb2.EXIT_CAUSE_LAUNCH_FAILED
        exited = worker.make_unstarted_exit(cause, reason)
        yield from self._remove_worker(worker, exited, WorkerStimulus.EXIT, now)

    def _end_worker(
        self, worker: HostedWorker, mode: agent_pb2.StopMode.ValueType, grace_s: float, *, reason: str, now: float
    ) -> Iterator[Instruction]:
        """Ask the worker to leave, and set when to kill it. A repetition may only bring its end forward.

        One whose process may not stay with the state saves it, unless it is spare.

        A survivor that is about to take its rank is asked when it has connected, because its state would be lost.
        """
        if mode == agent_pb2.STOP_MODE_HOLD_FIRST and not self._may_leave_unsaved(worker):
            mode = agent_pb2.STOP_MODE_SAVE_FIRST
        is_taking_rank = worker.is_in_place and worker.may_stay and worker.phase is WorkerPhase.STARTING
        if worker.phase is WorkerPhase.WAITING:
            yield from self._cancel_worker(worker, reason, now)
        elif worker.phase is WorkerPhase.KILLED:
            pass
        elif grace_s <= 0 or (
            mode == agent_pb2.STOP_MODE_LEAVE_NOW and not worker.has_connected and not is_taking_rank
        ):
            yield from self._kill_worker(worker, reason, now)
        else:
            is_more_urgent = worker.leave_mode not in (mode, agent_pb2.STOP_MODE_LEAVE_NOW) and (
                mode != agent_pb2.STOP_MODE_HOLD_FIRST or not worker.leave_mode
            )
            worker.apply_stimulus(WorkerStimulus.LEAVE, now)
            kill_at = now + grace_s
            if worker.kill_at is None or kill_at < worker.kill_at:
                worker.kill_at = kill_at
                worker.end_reason = f"{reason}; it had not left after {grace_s:g} s and was killed"
            if is_more_urgent:
                worker.leave_mode = mode
                may_save = mode in (agent_pb2.STOP_MODE_SAVE_FIRST, agent_pb2.STOP_MODE_HOLD_FIRST)
                worker.saving_since = now if may_save and worker.is_connected else None
                if worker.is_connected:
                    yield _make_leave(worker, mode, reason)

    def _kill_worker(self, worker: HostedWorker, reason: str, now: float) -> Iterator[Instruction]:
        worker.apply_stimulus(WorkerStimulus.KILL, now)
        worker.kill_at = worker.connect_by = None
        worker.end_reason = reason
        yield KillWorker(worker.key, reason)

    def _cancel_worker(self, worker: HostedWorker, reason: str, now: float) -> Iterator[Instruction]:
        if worker.start.rendezvous_port:
            yield ReleaseRendezvousPort(worker.start.rendezvous_port)
        cause = agent_pb2.EXIT_CAUSE_GENERATION_ENDED if worker.excuse is None else worker.excuse.cause
        exited = worker.make_unstarted_exit(cause, f"{reason}; it had not started yet")
        yield from self._remove_worker(worker, exited, WorkerStimulus.CANCEL, now)

    def _remove_worker(
        self, worker: HostedWorker, exited: agent_pb2.WorkerExited, stimulus: WorkerStimulus, now: float
    ) -> Iterator[Instruction]:
        worker.apply_stimulus(stimulus, now)
        worker.kill_at = worker.connect_by = None
        del self._by_key[worker.key]
        yield from self._reports.send_steps(even_if_full=True)  # its steps come before its end
        yield from self._reports.add_report(agent_pb2.Report(worker_exited=exited))
        if (
            stimulus is WorkerStimulus.EXIT
        ):  # a cancelled worker held no device, and the rest of its generation goes as well
            yield from self._start_waiting(now)

    # ------------------------------------------------------------ connections and messages

    def handle_connection(self, key: WorkerKey, pid: int, now: float) -> Iterator[Instruction]:
        if self._newcomers.is_newcomer(key):
            self._newcomers.handle_connection(key)
            return
        worker = self._by_key[key]
        worker.apply_stimulus(WorkerStimulus.HELLO, now)
        worker.is_connected = worker.has_connected = True
        worker.connect_by = None
        worker.pid = pid
        if worker.start.environment.secret and not worker.takes_process:  # else it came with the assignment
            yield AdmitWorker(key, worker.start.environment.secret)
        if worker.phase is WorkerPhase.LEAVING:
            reason = "the command to leave came before it had connected"
            yield _make_leave(worker, worker.leave_mode, reason)

    def handle_disconnection(self, key: WorkerKey) -> Iterator[Instruction]:
        if key in self._by_key:
            self._by_key[key].is_connected = False
        yield from self._survivors.kill_survivors(
            lambda survivor: survivor.key == key, "it has closed its connection, and can neither take a rank nor give"
        )

    def handle_message(self, key: WorkerKey, message: worker_pb2.WorkerMessage, now: float) -> Iterator[Instruction]:
        worker = self._by_key.get(key)
        if worker is not None:
            yield from self._handle_worker_message(worker, message, now)
        elif self._newcomers.is_newcomer(key):
            yield from self._newcomers.handle_message(key, message)
        elif self._survivors.is_survivor(key) and message.HasField("checkpoint_done"):
            yield from self._report_checkpoint(key, message.checkpoint_done)  # its files were under way when it left
        elif message.HasField("giving_state") and self._survivors.record_giving(key):
            yield from self._start_waiting(now)

    def _handle_worker_message(
        self, worker: HostedWorker, message: worker_pb2.WorkerMessage, now: float
    ) -> Iterator[Instruction]:
        match message.WhichOneof("body"):
            case "ready":
                worker.apply_stimulus(WorkerStimulus.READY, now)
                worker.health.step = message.ready.resumed_step
                yield from self._reports.add_report(messages.make_worker_started(worker, message.ready))
            case "step_done":
                yield from self._handle_step(worker, message.step_done)
            case "evaluated" | "waiting" | "log_values":
                self._note_activity(worker, message, now)
            case "step_traced":
                yield from self._report_trace(worker.key, message.step_traced)
            case "checkpoint_done":
                yield from self._report_checkpoint(worker.key, message.checkpoint_done)
            case "profile_done":
                yield from self._reports.add_report(messages.make_profile_measured(worker.key, message.profile_done))
            case "sent_ahead":
                worker.health.ahead_request = clean_text(message.sent_ahead.request, NAME_CHARS)
                worker.health.ahead_step = message.sent_ahead.step
                self._reports.hasten_heartbeat(now)
            case "unreached":
                error = clean_text(message.unreached.error, NAME_CHARS)
                worker.unreached = agent_pb2.Unreached(rank=message.unreached.rank, error=error)
            case "script_obstacle":
                worker.script_obstacle = clean_text(message.script_obstacle.reason, NAME_CHARS)
            case "failure":
                worker.failure = clean_text(message.failure.traceback, ERROR_CHARS)
                worker.shortage = message.failure.shortage if message.failure.HasField("shortage") else None
                worker.failed_before_leave = worker.phase in (WorkerPhase.CONNECTED, WorkerPhase.READY)
            case "generation_left":
                yield from self._handle_generation_left(worker, message.generation_left, now)
            case _:
                pass  # a second hello, or a newer library's message

    def _note_activity(self, worker: HostedWorker, message: worker_pb2.WorkerMessage, now: float) -> None:
        """What the script does beside its steps."""
        if message.HasField("evaluated"):
            worker.health.evaluated = message.evaluated.micro_batches
        elif message.HasField("waiting"):
            self._note_wait(worker, message.waiting, now)
        else:
            self._reports.add_values(worker.key, message.log_values)

    def _note_wait(self, worker: HostedWorker, waiting: worker_pb2.Waiting, now: float) -> None:
        was_quiet = list(worker.health.quiet_ranks)
        worker.health.waiting_for = waiting.waiting_for
        del worker.health.quiet_ranks[:]
        worker.health.quiet_ranks.extend(waiting.quiet_ranks[:_MOST_QUIET])
        if list(worker.health.quiet_ranks) != was_quiet:
            self._reports.hasten_heartbeat(now)

    def _report_trace(self, key: WorkerKey, traced: agent_pb2.StepTraced) -> Iterator[Instruction]:
        if self._reports.can_send:  # the next trace serves as well: none is kept for later
            yield from self._reports.add_report(messages.make_step_traced(key, traced))

    def _report_checkpoint(self, key: WorkerKey, done: worker_pb2.CheckpointDone) -> Iterator[Instruction]:
        # No rank repeats the steps before a checkpoint: their losses must not be lost with this VM.
        yield from self._reports.send_steps(even_if_full=True)
        yield from self._reports.add_report(messages.make_checkpoint_committed(key, done))

    def _handle_generation_left(
        self, worker: HostedWorker, left: worker_pb2.GenerationLeft, now: float
    ) -> Iterator[Instruction]:
        """Report the rank's exit, and keep its process as a survivor.

        One that may not stay is killed, and its exit is reported when the process has ended: a VM that is drained may
        be gone as soon as its last rank has left.
        """
        if worker.phase is WorkerPhase.KILLED or left.exit_code not in (EXIT_GENERATION_ENDED, EXIT_PEER_LOST):
            return  # its exit is reported when the process ends
        if worker.is_connected and worker.may_stay and worker.state_use.store:
            worker.left, worker.kill_at = left, now + self._store_s
            worker.end_reason = f"it had not put its state into memory within {self._store_s:g} s and was killed"
            yield SendStore(worker.key)
            return
        if not (worker.is_connected and self._may_stay(worker)):
            worker.left = left
            yield from self._kill_worker(worker, "it has left its generation, and its state is of no use", now)
            yield from self._start_waiting(now)
            return
        held = agent_pb2.HeldState(
            step=left.step, bytes=left.held_bytes, gives_only=left.gives_only, copies=left.copies[:_MOST_COPIES]
        )
        self._survivors.add_survivor(worker, held, now)
        if worker.start.rendezvous_port:
            yield ReleaseRendezvousPort(worker.start.rendezvous_port)
        exited = worker.make_survivor_exit(left.exit_code, held, now)
        yield from self._remove_worker(worker, exited, WorkerStimulus.EXIT, now)

    def _may_leave_unsaved(self, worker: HostedWorker) -> bool:
        return worker.state_use.spare or self._may_stay(worker)

    def _may_stay(self, worker: HostedWorker) -> bool:
        """Whether the worker's process may become a survivor."""
        others = (other for other in self._by_key.values() if other is not worker)
        is_device_free = all(
            other.local_rank != worker.local_rank or (other.is_in_place and worker.leaves_survivor_for(other))
            for other in others
        )
        return self._survivors.are_kept and worker.may_stay and is_device_free

    def _handle_step(self, worker: HostedWorker, done: worker_pb2.StepDone) -> Iterator[Instruction]:
        health = worker.health
        health.step = done.step
        health.forward_us, health.backward_us = done.forward_us, done.backward_us
        health.wait_us, health.memory_bytes = done.wait_us, done.memory_bytes
        yield from self._survivors.end_outdated(*worker.key.generation_key)
        yield from self._memories.end_outdated(*worker.key.generation_key)
        if not worker.reports_steps:
            return
        result = agent_pb2.StepResult(
            step=done.step,
            loss=done.loss,
            step_us=done.step_us,
            examples=done.examples,
            skipped=done.skipped,
            between=done.between,
            copied_step=done.copied_step,
            copies_obstacle=clean_text(done.copies_obstacle, NAME_CHARS),
            marks_obstacle=clean_text(done.marks_obstacle, NAME_CHARS),
            gradient_norm=done.gradient_norm if done.HasField("gradient_norm") else None,
            learning_rate=done.learning_rate if done.HasField("learning_rate") else None,
        )
        self._reports.add_step(worker.key, result)
        if not worker.has_reported_step:
            worker.has_reported_step = True  # the manager waits for this proof that the generation makes progress
            if self._reports.can_send:
                yield from self._reports.send_steps()

    def dump_stacks(self, request: agent_pb2.DumpStacks) -> Iterator[Instruction]:
        for worker in self.all:
            if worker.key.generation_key != (request.job_id, request.generation):
                continue
            if worker.has_process:
                yield ReadStacks(request.request_id, worker.key, worker.pid)
                continue
            error = "it has not started: its device is still in use"
            yield SendMessage(messages.make_stack_dump(request.request_id, worker.key, error=error))


def _make_leave(worker: HostedWorker, mode: agent_pb2.StopMode.ValueType, reason: str) -> SendLeave:
    use = worker.state_use
    return SendLeave(
        worker.key,
        mode,
        reason,
        keep_state=worker.may_stay,
        in_place=use.in_place,
        within_step=use.within_step,
        spare=use.spare,
        store_state=worker.may_stay and use.store,
    )
