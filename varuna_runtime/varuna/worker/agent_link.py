"""The worker's end of the Unix socket to its agent.

Messages go out from any thread. One daemon thread reads: `Leave` becomes a departure; the socket's end means that the
agent is gone, and then this process must end at once, because no other process would stop it. So it does where that
thread fails.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

import structlog

from varuna.devices.accelerator import list_accelerators, release_cached_memory
from varuna.devices.out_of_memory import MemoryFigures, measure_shortage
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import Departure, GenerationEnded, end_process
from varuna_proto import framing
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST, WorkerEnvironment
from varuna_proto.plan import Plan
from varuna_proto.plan_message import parse_plan_spec
from varuna_proto.v1 import agent_pb2, worker_pb2

_log = structlog.get_logger("varuna")

__all__ = [
    "AgentLink",
    "AheadCommand",
    "Assignment",
    "GiveCommand",
    "StateSources",
    "StoreCommand",
    "install_excepthook",
]


_PROGRESS_EVERY_S = 1.0
"""How often the count of `report_progress` is sent: as often as agents send heartbeats."""


class Assignment(NamedTuple):
    """This process is a rank of the next generation."""

    environment: WorkerEnvironment


class GiveCommand(NamedTuple):
    """The ranks of the next generation take the state of this process, which is none of them."""

    environment: WorkerEnvironment
    """Of one of those ranks."""


class AheadCommand(NamedTuple):
    """The generation that trains sends the state ahead to the ranks of the next one (`varuna.copies.rank_ahead`)."""

    generation: int
    """The one that trains,"""
    world_size: int
    rendezvous_host: str
    rendezvous_port: int
    secret: str
    """and where its ranks meet."""
    request: str
    """The same for the same next generation."""
    plan: Plan
    """Of the next generation."""
    ranks_before: tuple[int | None, ...]
    """By its ranks: the present rank of the process; None: it is a newcomer."""
    rank: int | None
    """Of this process in it; None: it has none."""
    processes: int
    """Of the job on this VM."""
    is_over: bool = False
    """The next generation is no longer wanted, so what was sent for it is of no use."""


class StoreCommand:
    """The state of this process is to outlive it, in a memory file (`varuna.holdings.memory_files`)."""


@dataclass(frozen=True, kw_only=True)
class StateSources:
    """Where the state of a rank has come from, in bytes."""

    kept_bytes: int = 0
    """It was in this process."""
    peer_bytes: int = 0
    """From memories of the generation before."""
    late_bytes: int = 0
    """From there, while it trained."""
    store_bytes: int = 0
    """From a checkpoint."""


class AgentLink:
    """Reports to the agent, and obeys it. Without an agent (`VARUNA_AGENT_SOCKET` is empty) reports go nowhere."""

    def __init__(self, environment: WorkerEnvironment, departure: Departure) -> None:
        """Raises ConnectionError when the agent's socket cannot be reached."""
        self.departure = departure
        """Of the present generation."""
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None
        self.secret = environment.secret
        """Of the generation."""
        self._progressed = 0
        self._progress_reported_s = -math.inf
        self._commands: SimpleQueue[worker_pb2.Assigned | worker_pb2.GiveState | worker_pb2.StoreState] = SimpleQueue()
        self._on_command: Callable[[], None] = lambda: None
        self._before_failure: Callable[[], None] = lambda: None
        self._on_failure: Callable[[], None] = lambda: None
        self._ahead: AheadCommand | None = None
        self._on_ahead: Callable[[AheadCommand], None] = lambda command: None
        if not environment.agent_socket:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(environment.agent_socket)
        except OSError as error:
            raise ConnectionError(
                f"no agent listens at VARUNA_AGENT_SOCKET={environment.agent_socket}: {error}"
            ) from error
        self._send_hello(environment)
        if environment.secret_from_agent:
            self.secret = _receive_secret(self._socket)
        threading.Thread(target=self._read, args=(self._socket,), name="varuna-agent-link", daemon=True).start()

    def report_at_door(self, read_variables: Iterable[str], obstacle: str) -> None:
        """Reports that this process waits for a rank, and which of the expected variables its script has read.

        `obstacle`: why it can take no rank; empty: it can.
        """
        at_door = worker_pb2.AtDoor(read_variables=read_variables, obstacle=obstacle)
        self._send(worker_pb2.WorkerMessage(at_door=at_door))

    # Sending the state ahead

    def follow_ahead(self, follow: Callable[[AheadCommand], None]) -> None:
        """`follow` is called, from another thread, with each command to send the state ahead; with the newest that has
        come at once."""
        self._on_ahead = follow
        if self._ahead is not None:
            follow(self._ahead)

    def report_sent_ahead(self, request: str, step: int) -> None:
        """Reports that all is there that this rank was to send of the state after `step` steps."""
        self._send(worker_pb2.WorkerMessage(sent_ahead=worker_pb2.SentAhead(request=request, step=step)))

    # Going on in the next generation

    def report_generation_left(
        self, exit_code: int, step: int, held_bytes: int, *, gives_only: bool, copies: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Reports that this process has left its generation and keeps the state of `step` for the next one.

        `exit_code`: that of a process that does not stay. `gives_only`: it cannot take a rank. `copies`: the rank and
        the step of each state that it keeps besides.
        """
        left = worker_pb2.GenerationLeft(exit_code=exit_code, step=step, held_bytes=held_bytes, gives_only=gives_only)
        left.copies.extend(agent_pb2.KeptCopy(rank=rank, step=of_step) for rank, of_step in copies)
        self._send(worker_pb2.WorkerMessage(generation_left=left))

    def report_script_obstacle(self, reason: str) -> None:
        """Reports what the script does that keeps this process from going on in the next generation."""
        self._send(worker_pb2.WorkerMessage(script_obstacle=worker_pb2.ScriptObstacle(reason=reason)))

    def wait_for_command(self) -> Assignment | GiveCommand | StoreCommand:
        """Waits for this process's part in the next generation. If it is a rank, its output and its environment
        variables follow.

        The wait has no limit: the agent ends a process that no generation needs.
        """
        command = self._commands.get()
        if isinstance(command, worker_pb2.StoreState):
            return StoreCommand()
        environment = WorkerEnvironment.from_environ(command.environment)
        assert environment is not None, "the agent named no generation"
        environment = replace(environment, secret=command.secret)
        if isinstance(command, worker_pb2.GiveState):
            return GiveCommand(environment)
        self.secret = command.secret
        os.environ.update(command.environment)
        _redirect_output(command.log_path)
        return Assignment(environment)

    @property
    def has_command(self) -> bool:
        """Whether `wait_for_command` returns at once."""
        return not self._commands.empty()

    def notify_of_command(self, notify: Callable[[], None]) -> None:
        """`notify` is called, from another thread, when `wait_for_command` has something to return; also at once."""
        self._on_command = notify
        if self.has_command:
            notify()

    def report_giving(self, host_bytes: int) -> None:
        """Reports that the state is in host memory and that the device's memory is free."""
        giving = worker_pb2.GivingState(host_bytes=host_bytes)
        self._send(worker_pb2.WorkerMessage(giving_state=giving))

    def greet_as(self, environment: WorkerEnvironment, departure: Departure) -> None:
        """Reports to the agent as that rank. The agent's commands concern `departure` from now on."""
        self.departure = departure
        self._progress_reported_s = -math.inf
        self._send_hello(environment)

    def _send_hello(self, environment: WorkerEnvironment) -> None:
        hello = worker_pb2.WorkerHello(
            job_id=environment.job_id,
            generation=environment.generation,
            rank=environment.rank,
            pid=os.getpid(),
            newcomer=environment.newcomer,
        )
        self._send(worker_pb2.WorkerMessage(hello=hello))

    # Reports

    def report_ready(
        self,
        resumed_step: int,
        phases_s: Mapping[str, float],
        sources: StateSources,
        *,
        micro_batches_redone: int = 0,
        micro_batches_left: int = 0,
    ) -> None:
        """Reports that the model is built and the state of `resumed_step` is there.

        `phases_s`: seconds by phase. `micro_batches_left`: those of the next step that all replicas run; 0: not known.
        `micro_batches_redone`: those of them that are run again.
        """
        phases = [agent_pb2.Phase(name=name, seconds=seconds) for name, seconds in phases_s.items()]
        ready = worker_pb2.WorkerReady(
            resumed_step=resumed_step,
            phases=phases,
            kept_bytes=sources.kept_bytes,
            peer_bytes=sources.peer_bytes,
            late_bytes=sources.late_bytes,
            store_bytes=sources.store_bytes,
            micro_batches_redone=micro_batches_redone,
            micro_batches_left=micro_batches_left,
        )
        self._send(worker_pb2.WorkerMessage(ready=ready))

    def report_step(self, step: worker_pb2.StepDone) -> None:
        self._send(worker_pb2.WorkerMessage(step_done=step))

    def report_progress(self) -> None:
        """Counts a finished micro-batch of an evaluation, or a piece of the state that was loaded.

        Neither is a step, but both show that this worker does not hang. The count is sent about once a second, so this
        is cheap enough for every one.
        """
        self._progressed += 1
        now_s = time.monotonic()
        if now_s - self._progress_reported_s >= _PROGRESS_EVERY_S:
            self._progress_reported_s = now_s
            self._send(worker_pb2.WorkerMessage(evaluated=worker_pb2.Evaluated(micro_batches=self._progressed)))

    def report_values(self, step: int, values: Mapping[str, float]) -> None:
        """Reports what the script has logged at a step, by name."""
        self._send(worker_pb2.WorkerMessage(log_values=worker_pb2.LogValues(step=step, values=values)))

    def report_step_trace(self, traced: agent_pb2.StepTraced) -> None:
        """Reports what this rank did in a step."""
        self._send(worker_pb2.WorkerMessage(step_traced=traced))

    def report_checkpoint(self, step: int, url: str, total_bytes: int) -> None:
        """Reports a committed checkpoint."""
        done = worker_pb2.CheckpointDone(step=step, url=url, total_bytes=total_bytes)
        self._send(worker_pb2.WorkerMessage(checkpoint_done=done))

    def report_profile(self, profile_json: str, *, from_cache: bool) -> None:
        """Reports the profile, measured now or by an earlier generation (`from_cache`)."""
        done = worker_pb2.ProfileDone(profile_json=profile_json, from_cache=from_cache)
        self._send(worker_pb2.WorkerMessage(profile_done=done))

    def send_waiting(self, waiting_for: agent_pb2.WaitKind.ValueType, quiet_ranks: Iterable[int] = ()) -> None:
        """Where this worker waits for other ranks now, and which of them do not answer."""
        waiting = worker_pb2.Waiting(waiting_for=waiting_for, quiet_ranks=quiet_ranks)
        self._send(worker_pb2.WorkerMessage(waiting=waiting))

    def store_on_failure(self, store_state: Callable[[], None], *, wait_first: Callable[[], None]) -> None:
        """`store_state` is called when the script has raised an exception. The process then ends in any case.

        `wait_first`: returns when the exception may be reported, whereupon other ranks leave. Never raises.
        """
        self._before_failure, self._on_failure = wait_first, store_state

    def handle_failure(self, text: str, shortage: MemoryFigures | None = None) -> None:
        """The script has failed with this traceback, and this process is about to end.

        `shortage`: of its device's memory, if it failed for that.
        """
        self._before_failure()
        self.report_failure(text, shortage)
        try:
            self._on_failure()
        except Exception as error:  # the device or the script's own state may be the reason for the failure
            _log.warning("the state of this process ends with it", reason=first_line(error))

    def report_failure(self, text: str, shortage: MemoryFigures | None = None) -> None:
        """Reports the traceback of the script's failure, and what its device lacked."""
        figures = None if shortage is None else agent_pb2.MemoryShortage(**shortage._asdict())
        self._send(worker_pb2.WorkerMessage(failure=worker_pb2.WorkerFailure(traceback=text, shortage=figures)))

    def report_unreached(self, rank: int, error: str) -> None:
        """Reports that this worker leaves because it cannot reach that rank."""
        self._send(worker_pb2.WorkerMessage(unreached=agent_pb2.Unreached(rank=rank, error=error)))

    def _send(self, message: worker_pb2.WorkerMessage) -> None:
        if self._socket is None:
            return
        data = framing.frame(message)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            end_process(EXIT_GENERATION_ENDED)

    def _read(self, connection: socket.socket) -> None:
        code = EXIT_GENERATION_ENDED
        try:
            while (message := framing.receive(connection, worker_pb2.AgentToWorker)) is not None:
                self._obey(message)
        except Exception:  # without this thread, this process would obey no more, and outlive its agent
            _log.exception("what the agent has sent cannot be handled: this process ends")
            code = EXIT_PEER_LOST
        end_process(code)

    def _obey(self, message: worker_pb2.AgentToWorker) -> None:
        if message.HasField("assigned"):
            self._commands.put(message.assigned)
        elif message.HasField("give_state"):
            self._commands.put(message.give_state)
            self._on_command()
        elif message.HasField("store_state"):
            self._commands.put(message.store_state)
            self._on_command()
        elif message.HasField("ahead_part"):
            self._ahead = _read_ahead(message.ahead_part)
            self._on_ahead(self._ahead)
        elif message.leave.mode == agent_pb2.STOP_MODE_HOLD_FIRST:
            leave = message.leave
            self.departure.request_hold_first(
                in_place=leave.in_place, within_step=leave.within_step, is_spare=leave.spare
            )
        elif message.leave.mode == agent_pb2.STOP_MODE_SAVE_FIRST:
            self.departure.request_save_first(may_stay=message.leave.keep_state)
        elif message.leave.mode == agent_pb2.STOP_MODE_LEAVE_NOW:
            exit_ = GenerationEnded("the agent asked this worker to leave now")
            leave = message.leave
            self.departure.leave_generation(exit_, may_stay=leave.keep_state, at_once=leave.store_state)


def _read_ahead(part: worker_pb2.AheadPart) -> AheadCommand:
    command = part.command
    return AheadCommand(
        generation=command.generation,
        world_size=command.world_size,
        rendezvous_host=command.rendezvous_host,
        rendezvous_port=command.rendezvous_port,
        secret=command.secret,
        request=command.request,
        plan=parse_plan_spec(command.plan),
        ranks_before=tuple(rank - 1 if rank else None for rank in command.ranks_before),
        rank=part.rank if part.HasField("rank") else None,
        processes=part.processes,
        is_over=command.is_over,
    )


def _redirect_output(log_path: str) -> None:
    """Writes this process's output to the file from now on, that of libraries and of child processes too."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the log's reader is gone or the script closed the stream
            stream.flush()
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:  # a full disk, say: the training is worth more than the place of its output
        _log.warning("the output goes on in the log of the generation before", error=str(error))
        return
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _receive_secret(connection: socket.socket) -> str:
    """The generation's secret from the agent. It turns away all but its own workers, and then this process ends."""
    message = framing.receive(connection, worker_pb2.AgentToWorker)
    if message is None:
        end_process(EXIT_GENERATION_ENDED)
        raise SystemExit(EXIT_GENERATION_ENDED)
    return message.admitted.secret


def install_excepthook(link: AgentLink) -> None:
    """Reports an uncaught exception to the agent with its traceback, and ends the process at once (code 1)."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        text, shortage = "".join(traceback.format_exception(kind, error, trace)), measure_shortage(error)
        if shortage is not None:  # what the frames hold would be lacking where the state is stored
            traceback.clear_frames(trace)
            with suppress(RuntimeError):
                release_cached_memory(list_accelerators())
        link.handle_failure(text, shortage)
        end_process(1)

    sys.excepthook = report
