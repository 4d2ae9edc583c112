"""The life of one worker: its phases, their transitions, and the meaning of its exit.

    WAITING ──start──> STARTING ──hello──> CONNECTED ──ready──> READY
                           │                   │                  │
                           └───────leave───────┴──> LEAVING <─────┘
    any started phase ──kill──> KILLED           any started phase ──exit──> GONE           WAITING ──cancel──> GONE

A worker also exits when its process leaves the generation and stays (`survivors.py`). A worker of a Launch in place
starts in such a process.

Messages of a worker may still arrive after it was sent a leave command or killed; they change nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from varuna_agent.state.instructions import StartWorker
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.bounds import ERROR_CHARS, clean_text
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST
from varuna_proto.state_use import StateUse
from varuna_proto.v1 import agent_pb2, worker_pb2

_SHELL_CANNOT_RUN = (126, 127)
_LAST_LINE_CHARS = 300
_TRACEBACK = "Traceback (most recent call last)"


class WorkerPhase(StrEnum):
    WAITING = "waiting"
    """Accepted; older workers on its device have to end first."""
    STARTING = "starting"
    CONNECTED = "connected"
    READY = "ready"
    LEAVING = "leaving"
    KILLED = "killed"
    GONE = "gone"


class WorkerStimulus(StrEnum):
    START = "start"
    CANCEL = "cancel"
    HELLO = "hello"
    READY = "ready"
    LEAVE = "leave"
    KILL = "kill"
    EXIT = "exit"


_TRANSITIONS: dict[WorkerPhase, dict[WorkerStimulus, WorkerPhase]] = {
    WorkerPhase.WAITING: {WorkerStimulus.START: WorkerPhase.STARTING, WorkerStimulus.CANCEL: WorkerPhase.GONE},
    WorkerPhase.STARTING: {
        WorkerStimulus.HELLO: WorkerPhase.CONNECTED,
        WorkerStimulus.LEAVE: WorkerPhase.LEAVING,
        WorkerStimulus.KILL: WorkerPhase.KILLED,
        WorkerStimulus.EXIT: WorkerPhase.GONE,
    },
    WorkerPhase.CONNECTED: {
        WorkerStimulus.READY: WorkerPhase.READY,
        WorkerStimulus.LEAVE: WorkerPhase.LEAVING,
        WorkerStimulus.KILL: WorkerPhase.KILLED,
        WorkerStimulus.EXIT: WorkerPhase.GONE,
    },
    WorkerPhase.READY: {
        WorkerStimulus.READY: WorkerPhase.READY,
        WorkerStimulus.LEAVE: WorkerPhase.LEAVING,
        WorkerStimulus.KILL: WorkerPhase.KILLED,
        WorkerStimulus.EXIT: WorkerPhase.GONE,
    },
    WorkerPhase.LEAVING: {
        WorkerStimulus.HELLO: WorkerPhase.LEAVING,
        WorkerStimulus.READY: WorkerPhase.LEAVING,
        WorkerStimulus.LEAVE: WorkerPhase.LEAVING,
        WorkerStimulus.KILL: WorkerPhase.KILLED,
        WorkerStimulus.EXIT: WorkerPhase.GONE,
    },
    WorkerPhase.KILLED: {
        WorkerStimulus.HELLO: WorkerPhase.KILLED,
        WorkerStimulus.READY: WorkerPhase.KILLED,
        WorkerStimulus.EXIT: WorkerPhase.GONE,
    },
    WorkerPhase.GONE: {},
}


KERNEL_KILL = "The kernel killed a process of the job"
"""How the line begins that `workers.processes` adds to a worker's log when the job has reached its memory limit."""


class ExitExcuse(NamedTuple):
    """Why the agent itself ends a worker, when neither the manager nor the job is the reason."""

    cause: agent_pb2.ExitCause.ValueType
    """The cause to report with the exit."""
    reason: str


_START_PHASES = {WorkerStimulus.START: "wait", WorkerStimulus.HELLO: "process"}
"""The part of a start that each stimulus ends."""


class IllegalPhaseChangeError(RuntimeError):
    """The worker's phase does not allow the stimulus: a defect of the agent. The message has the worker's history."""


@dataclass
class HostedWorker:
    """One worker on this VM, as the agent knows it."""

    key: WorkerKey
    local_rank: int
    start: StartWorker
    reports_steps: bool
    """True for the lowest rank of its generation on this VM: all ranks have the same losses."""
    is_in_place: bool = False
    """It starts in a surviving process, never in a new one."""
    was_newcomer: bool = False
    """Its process was started ahead, and has waited for the rank."""
    connect_by: float | None = None
    """When a process that was there before is killed, if it has not connected as this worker by then."""
    may_stay: bool = True
    """Its process may stay for the next generation. A command to leave that does not keep the state ends this."""
    state_use: StateUse = field(default_factory=StateUse)
    """By the newest command to leave."""
    phase: WorkerPhase = WorkerPhase.WAITING
    is_connected: bool = False
    has_connected: bool = False
    pid: int = 0
    health: agent_pb2.WorkerHealth = field(default_factory=agent_pb2.WorkerHealth)
    failure: str = ""
    """The traceback that the worker sent."""
    shortage: agent_pb2.MemoryShortage | None = None
    """What its device lacked, if the script failed for that."""
    failed_before_leave: bool = False
    leave_mode: agent_pb2.StopMode.ValueType = agent_pb2.STOP_MODE_UNSPECIFIED
    kill_at: float | None = None
    end_reason: str = ""
    """Why the agent ends the worker; empty: it does not."""
    excuse: ExitExcuse | None = None
    saving_since: float | None = None
    """When the agent sent the command after which it may save; None: never, or a more urgent command followed."""
    unreached: agent_pb2.Unreached | None = None
    """The peer that the worker could not reach."""
    script_obstacle: str = ""
    """What its script does that keeps its process from going on in place; empty: nothing known."""
    left: worker_pb2.GenerationLeft | None = None
    """Set when it has left its generation and may not stay: its exit is reported as that once its process has ended."""
    stored: agent_pb2.HeldState | None = None
    """What it has left in a memory file."""
    has_reported_step: bool = False
    start_phases: dict[str, float] = field(default_factory=dict)
    """Seconds of its start by phase: `wait` for a device, then `process` until the worker connects."""
    _phase_began_at: float | None = None
    _history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.health.job_id = self.key.job_id
        self.health.generation = self.key.generation
        self.health.rank = self.key.rank

    def start_clock(self, now: float) -> None:
        """The start of an accepted worker takes time from now on."""
        self._phase_began_at = now

    def apply_stimulus(self, stimulus: WorkerStimulus, now: float) -> None:
        """Go to the next phase. Raises IllegalPhaseChangeError with the worker's history."""
        target = _TRANSITIONS[self.phase].get(stimulus)
        if target is None:
            history = ", ".join(self._history) or "nothing before"
            raise IllegalPhaseChangeError(f"worker {self.key} is {self.phase}: no {stimulus} then (history: {history})")
        if stimulus in _START_PHASES and self._phase_began_at is not None:
            self.start_phases[_START_PHASES[stimulus]] = now - self._phase_began_at
            self._phase_began_at = now
        if target != self.phase:
            self._history.append(f"{stimulus} at {now:.3f}")
        self.phase = target

    @property
    def takes_process(self) -> bool:
        """Whether it is a process that was there before, which got the rank with its secret."""
        return self.is_in_place or self.was_newcomer

    @property
    def has_process(self) -> bool:
        return self.phase not in (WorkerPhase.WAITING, WorkerPhase.GONE)

    def leaves_survivor_for(self, successor: HostedWorker) -> bool:
        """Whether its process may still stay and take the rank of `successor`, a worker of a newer generation."""
        is_older = self.key.job_id == successor.key.job_id and self.key.generation < successor.key.generation
        can_stay = self.has_process and self.phase is not WorkerPhase.KILLED and self.may_stay
        return is_older and can_stay and self.local_rank == successor.local_rank

    def holds_device(self, kind: str) -> bool:
        """Whether the next worker on its device has to wait until this one has ended.

        The memory of a GPU is free only when the process is gone, and the next worker needs all of it. On the CPU the
        next worker may start beside one that leaves at once or was killed, so that a slow end (a thread sits in a call,
        gigabytes are unmapped) delays nothing.
        """
        leaves_at_once = self.phase is WorkerPhase.LEAVING and self.leave_mode == agent_pb2.STOP_MODE_LEAVE_NOW
        return kind != "cpu" or not (leaves_at_once or self.phase is WorkerPhase.KILLED)

    def make_exit(self, exit_code: int, log_tail: str, now: float) -> agent_pb2.WorkerExited:
        """The report of the end of its process."""
        code = _decode_shell_code(exit_code)
        cause = self._cause(code)
        has_only_held = self.left is not None and self.leave_mode == agent_pb2.STOP_MODE_HOLD_FIRST
        has_only_held |= self.stored is not None
        since = self.saving_since if code == EXIT_GENERATION_ENDED and not has_only_held else None
        return agent_pb2.WorkerExited(
            job_id=self.key.job_id,
            generation=self.key.generation,
            rank=self.key.rank,
            cause=cause,
            exit_code=code,
            error_text=clean_text(self._error_text(cause, code, log_tail), ERROR_CHARS),
            save_s=0.0 if since is None else now - since,
            unreached=self.unreached if cause == agent_pb2.EXIT_CAUSE_PEER_LOST else None,
            script_obstacle=self.script_obstacle,
            held=self.stored,
            shortage=self.shortage if cause == agent_pb2.EXIT_CAUSE_OUT_OF_MEMORY else None,
        )

    def make_survivor_exit(self, exit_code: int, held: agent_pb2.HeldState, now: float) -> agent_pb2.WorkerExited:
        """The report of a process that has left the generation and stays."""
        exited = self.make_exit(exit_code, "its process left the generation without ending", now)
        exited.held.CopyFrom(held)
        if self.leave_mode == agent_pb2.STOP_MODE_HOLD_FIRST:
            exited.save_s = 0.0  # it has not saved
        return exited

    def make_unstarted_exit(self, cause: agent_pb2.ExitCause.ValueType, reason: str) -> agent_pb2.WorkerExited:
        return agent_pb2.WorkerExited(
            job_id=self.key.job_id,
            generation=self.key.generation,
            rank=self.key.rank,
            cause=cause,
            error_text=clean_text(reason, ERROR_CHARS),
        )

    def _cause(self, code: int) -> agent_pb2.ExitCause.ValueType:
        cause = self._own_cause(code)
        return self.excuse.cause if self.excuse is not None and cause in _ENDED_FROM_OUTSIDE else cause

    def _own_cause(self, code: int) -> agent_pb2.ExitCause.ValueType:
        if code in _CAUSES:
            return _CAUSES[code]
        if code < 0 or self.phase is WorkerPhase.KILLED:
            return agent_pb2.EXIT_CAUSE_KILLED
        if code in _SHELL_CANNOT_RUN and self.phase is WorkerPhase.STARTING:
            return agent_pb2.EXIT_CAUSE_LAUNCH_FAILED
        if self.phase is WorkerPhase.LEAVING and not self.failed_before_leave:
            # The worker was sent a leave command and left, if not tidily (user code may catch and raise again).
            # To blame the script would fail the job; a faulty script fails again in the next generation.
            return agent_pb2.EXIT_CAUSE_GENERATION_ENDED
        if self.shortage is not None:
            return agent_pb2.EXIT_CAUSE_OUT_OF_MEMORY
        return agent_pb2.EXIT_CAUSE_SCRIPT_FAILED

    def _error_text(self, cause: agent_pb2.ExitCause.ValueType, code: int, log_tail: str) -> str:
        if cause == agent_pb2.EXIT_CAUSE_FINISHED:
            return ""
        if self.excuse is not None and cause == self.excuse.cause:
            return self.failure or self.excuse.reason
        if self.phase is WorkerPhase.KILLED:
            return self.failure or self.end_reason
        if code == EXIT_GENERATION_ENDED:
            return self.failure
        if self.failure:
            return self.failure
        if cause == agent_pb2.EXIT_CAUSE_KILLED:
            if log_tail.rstrip().rpartition("\n")[2].startswith(KERNEL_KILL):
                return f"Last lines of its log:\n{log_tail}"
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            # The log first: a display of one line shows the last one.
            return f"Last lines of its log:\n{log_tail}\nended by {name}, which Varuna did not send"
        if not log_tail:
            return f"exit code {code}; its log is empty"
        if cause != agent_pb2.EXIT_CAUSE_SCRIPT_FAILED or _TRACEBACK in log_tail:
            return log_tail
        # Without a traceback its last line is no cause.
        log = log_tail.rstrip()
        last_line = log.rpartition("\n")[2].strip()
        return f"Last lines of its log:\n{log}\nexit code {code}, last line: {last_line[:_LAST_LINE_CHARS]}"


_CAUSES: dict[int, agent_pb2.ExitCause.ValueType] = {
    0: agent_pb2.EXIT_CAUSE_FINISHED,
    EXIT_GENERATION_ENDED: agent_pb2.EXIT_CAUSE_GENERATION_ENDED,
    EXIT_PEER_LOST: agent_pb2.EXIT_CAUSE_PEER_LOST,
}


_ENDED_FROM_OUTSIDE = frozenset({agent_pb2.EXIT_CAUSE_KILLED, agent_pb2.EXIT_CAUSE_GENERATION_ENDED})
"""Causes of the exits of workers that another process ended."""


def _decode_shell_code(exit_code: int) -> int:
    """Turn a shell's exit code 128+n, for a child that signal n ended, into −n."""
    return -(exit_code - 128) if 128 < exit_code <= 128 + 64 else exit_code
