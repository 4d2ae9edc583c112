"""The life of one worker: phases, their transitions, and what its exit means.

    WAITING ──start──> STARTING ──hello──> CONNECTED ──ready──> READY
                           │                   │                  │
                           └───────leave───────┴──> LEAVING <─────┘
    any started phase ──kill──> KILLED           any started phase ──exit──> GONE           WAITING ──cancel──> GONE

A worker may still speak after it was told to leave or killed (messages under way); that changes nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from varuna_agent.state.stimuli import StartWorker, WorkerKey
from varuna_proto.bounds import ERROR_CHARS, clean_text
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST
from varuna_proto.v1 import agent_pb2

_SHELL_CANNOT_RUN = (126, 127)


class Phase(StrEnum):
    WAITING = "waiting"
    """Accepted; older workers on its devices have to end first."""
    STARTING = "starting"
    CONNECTED = "connected"
    READY = "ready"
    LEAVING = "leaving"
    KILLED = "killed"
    GONE = "gone"


class Stimulus(StrEnum):
    START = "start"
    CANCEL = "cancel"
    HELLO = "hello"
    READY = "ready"
    LEAVE = "leave"
    KILL = "kill"
    EXIT = "exit"


_TRANSITIONS: dict[Phase, dict[Stimulus, Phase]] = {
    Phase.WAITING: {Stimulus.START: Phase.STARTING, Stimulus.CANCEL: Phase.GONE},
    Phase.STARTING: {
        Stimulus.HELLO: Phase.CONNECTED,
        Stimulus.LEAVE: Phase.LEAVING,
        Stimulus.KILL: Phase.KILLED,
        Stimulus.EXIT: Phase.GONE,
    },
    Phase.CONNECTED: {
        Stimulus.READY: Phase.READY,
        Stimulus.LEAVE: Phase.LEAVING,
        Stimulus.KILL: Phase.KILLED,
        Stimulus.EXIT: Phase.GONE,
    },
    Phase.READY: {
        Stimulus.READY: Phase.READY,
        Stimulus.LEAVE: Phase.LEAVING,
        Stimulus.KILL: Phase.KILLED,
        Stimulus.EXIT: Phase.GONE,
    },
    Phase.LEAVING: {
        Stimulus.HELLO: Phase.LEAVING,
        Stimulus.READY: Phase.LEAVING,
        Stimulus.LEAVE: Phase.LEAVING,
        Stimulus.KILL: Phase.KILLED,
        Stimulus.EXIT: Phase.GONE,
    },
    Phase.KILLED: {
        Stimulus.HELLO: Phase.KILLED,
        Stimulus.READY: Phase.KILLED,
        Stimulus.EXIT: Phase.GONE,
    },
    Phase.GONE: {},
}


class Excuse(NamedTuple):
    """Why the agent ends a worker where neither the manager nor the job is the reason."""

    cause: agent_pb2.ExitCause.ValueType
    """Of the exit that is reported."""
    reason: str


_ENDS_PHASE = {Stimulus.START: "wait", Stimulus.HELLO: "process"}
"""Of a start."""


class IllegalTransitionError(RuntimeError):
    """A stimulus that the worker's phase does not know: a defect of the agent. Carries the worker's story."""


@dataclass
class Worker:
    """One worker as the agent sees it."""

    key: WorkerKey
    local_rank: int
    start: StartWorker
    reports_steps: bool
    """The lowest rank of its generation on this VM speaks for all of them: they have the same losses."""
    phase: Phase = Phase.WAITING
    connected: bool = False
    """Whether its connection stands now."""
    has_connected: bool = False
    pid: int = 0
    health: agent_pb2.WorkerHealth = field(default_factory=agent_pb2.WorkerHealth)
    failure: str = ""
    """The traceback that it sent."""
    failed_before_leave: bool = False
    leave_mode: agent_pb2.StopMode.ValueType = agent_pb2.STOP_MODE_UNSPECIFIED
    kill_at: float | None = None
    end_reason: str = ""
    """Why the agent ends it; empty: the agent does not."""
    excuse: Excuse | None = None
    saving_since: float | None = None
    """When it was told to save and leave; None: it was not, or not only that."""
    unreached: agent_pb2.Unreached | None = None
    """The peer that it could not reach."""
    has_reported_step: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    """What its start took so far, in seconds: its wait for a device, then its process until that connects."""
    _since: float | None = None
    _story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.health.job_id = self.key.job_id
        self.health.generation = self.key.generation
        self.health.rank = self.key.rank

    def accepted(self, now: float) -> None:
        """From here on its start takes time."""
        self._since = now

    def move(self, stimulus: Stimulus, now: float) -> None:
        """Go to the next phase. Raises IllegalTransitionError with all that has happened to the worker."""
        target = _TRANSITIONS[self.phase].get(stimulus)
        if target is None:
            story = ", ".join(self._story) or "nothing before"
            raise IllegalTransitionError(f"worker {self.key} is {self.phase}: no {stimulus} then (story: {story})")
        if stimulus in _ENDS_PHASE and self._since is not None:
            self.phases[_ENDS_PHASE[stimulus]] = now - self._since
            self._since = now
        if target != self.phase:
            self._story.append(f"{stimulus} at {now:.3f}")
        self.phase = target

    @property
    def has_process(self) -> bool:
        return self.phase not in (Phase.WAITING, Phase.GONE)

    def holds_device(self, kind: str) -> bool:
        """Whether the next worker on its device has to wait until this one has ended.

        The memory of a GPU is free only when the process is gone, and the next one needs all of it. On the CPU a worker
        that was told to leave at once, or was killed, takes nothing from the next one, which may start beside it: an
        end that takes its time (a thread sits in a call, gigabytes are unmapped) then costs none.
        """
        leaves_at_once = self.phase is Phase.LEAVING and self.leave_mode == agent_pb2.STOP_MODE_LEAVE_NOW
        return kind != "cpu" or not (leaves_at_once or self.phase is Phase.KILLED)

    def exited(self, exit_code: int, log_tail: str, now: float) -> agent_pb2.WorkerExited:
        """What to report about its end."""
        code = _signal_of_shell(exit_code)
        cause = self._cause(code)
        since = self.saving_since if code == EXIT_GENERATION_ENDED else None
        return agent_pb2.WorkerExited(
            job_id=self.key.job_id,
            generation=self.key.generation,
            rank=self.key.rank,
            cause=cause,
            exit_code=code,
            error_text=clean_text(self._error_text(cause, code, log_tail), ERROR_CHARS),
            save_s=0.0 if since is None else now - since,
            unreached=self.unreached if cause == agent_pb2.EXIT_CAUSE_PEER_LOST else None,
        )

    def never_ran(self, cause: agent_pb2.ExitCause.ValueType, reason: str) -> agent_pb2.WorkerExited:
        return agent_pb2.WorkerExited(
            job_id=self.key.job_id,
            generation=self.key.generation,
            rank=self.key.rank,
            cause=cause,
            error_text=clean_text(reason, ERROR_CHARS),
        )

    def _cause(self, code: int) -> agent_pb2.ExitCause.ValueType:
        cause = self._own_cause(code)
        return self.excuse.cause if self.excuse is not None and cause in _MADE_TO_END else cause

    def _own_cause(self, code: int) -> agent_pb2.ExitCause.ValueType:
        if code in _CAUSES:
            return _CAUSES[code]
        if code < 0 or self.phase is Phase.KILLED:
            return agent_pb2.EXIT_CAUSE_KILLED
        if code in _SHELL_CANNOT_RUN and self.phase is Phase.STARTING:
            return agent_pb2.EXIT_CAUSE_LAUNCH_FAILED
        if self.phase is Phase.LEAVING and not self.failed_before_leave:
            # Told to leave, it left, if not tidily (user code may catch and raise anew). To call that the script's
            # own fault would fail the job; a script that really is at fault fails again in the next generation.
            return agent_pb2.EXIT_CAUSE_GENERATION_ENDED
        return agent_pb2.EXIT_CAUSE_SCRIPT_FAILED

    def _error_text(self, cause: agent_pb2.ExitCause.ValueType, code: int, log_tail: str) -> str:
        if cause == agent_pb2.EXIT_CAUSE_FINISHED:
            return ""
        if self.excuse is not None and cause == self.excuse.cause:
            return self.failure or self.excuse.reason
        if self.phase is Phase.KILLED:
            return self.failure or self.end_reason
        if code == EXIT_GENERATION_ENDED:
            return self.failure
        if self.failure:
            return self.failure
        if cause == agent_pb2.EXIT_CAUSE_KILLED:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            # The log first: who shows one line of this shows the last.
            return f"Last lines of its log:\n{log_tail}\nended by {name}, which Varuna did not send"
        return log_tail or f"exit code {code}; its log is empty"


_CAUSES: dict[int, agent_pb2.ExitCause.ValueType] = {
    0: agent_pb2.EXIT_CAUSE_FINISHED,
    EXIT_GENERATION_ENDED: agent_pb2.EXIT_CAUSE_GENERATION_ENDED,
    EXIT_PEER_LOST: agent_pb2.EXIT_CAUSE_PEER_LOST,
}


_MADE_TO_END = frozenset({agent_pb2.EXIT_CAUSE_KILLED, agent_pb2.EXIT_CAUSE_GENERATION_ENDED})
"""Exits of workers that somebody had end."""


def _signal_of_shell(exit_code: int) -> int:
    """The commands run under a shell, which tells a child's death by signal n as 128+n; to us it is −n."""
    return -(exit_code - 128) if 128 < exit_code <= 128 + 64 else exit_code
