"""The states of jobs, generations, VMs and workers, and the allowed transitions.

Every change of a state goes through `advance`, which checks the tables below. A transition that is not in its table is
a bug: it raises with the object's history, so that the log shows how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GenerationState(StrEnum):
    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class VmState(StrEnum):
    REQUESTED = "requested"
    """Requested from the provider; its agent has not connected yet."""
    READY = "ready"
    SUSPECT = "suspect"
    """Heartbeats are missing: nothing new is launched there."""
    DRAINING = "draining"
    """It is about to leave: it has notice, or it is surplus."""
    LOST = "lost"
    """Silent for so long that its workers count as lost. The provider still lists it."""
    GONE = "gone"
    """The provider no longer has it, so nothing runs there."""


class WorkerState(StrEnum):
    ASSIGNED = "assigned"
    RUNNING = "running"
    EXITED = "exited"
    """Its agent reported its exit."""
    LOST = "lost"
    """It was lost with its VM."""


class GenerationKind(StrEnum):
    CALIBRATION = "calibration"
    TRAINING = "training"


class ExitCause(StrEnum):
    """Why a worker stopped; the agent protocol's causes, and the loss of its VM."""

    FINISHED = "finished"
    GENERATION_ENDED = "generation_ended"
    PEER_LOST = "peer_lost"
    SCRIPT_FAILED = "script_failed"
    OUT_OF_MEMORY = "out_of_memory"
    """Its device had no memory left."""
    KILLED = "killed"
    LAUNCH_FAILED = "launch_failed"
    LAUNCH_REFUSED = "launch_refused"
    """Its agent refused to start it."""
    LEASE_OVER = "lease_over"
    """Its agent ended it after a whole lease without contact to the manager."""
    AGENT_ENDED = "agent_ended"
    """It ended with its agent, which was stopped or restarted."""
    VM_GONE = "vm_gone"


class WaitKind(StrEnum):
    """Where a worker waits for other ranks; the value is the call of the script, as it is shown to users."""

    RENDEZVOUS = "Varuna()"
    STEP = "step()"
    EVALUATION = "evaluate()"
    CHECKPOINT = "checkpoint()"
    LOAD = "load_checkpoint()"
    RESUME = "resume()"


class EndCause(StrEnum):
    """Why a generation ended (or is being stopped)."""

    FINISHED = "finished"
    PROFILED = "profiled"
    SCRIPT_FAILED = "script_failed"
    OUT_OF_MEMORY = "out_of_memory"
    """The device of one of its ranks had no memory left. The job gets a new plan, with more room."""
    WORKER_FAILED = "worker_failed"
    VM_LOST = "vm_lost"
    MANAGER_AWAY = "manager_away"
    """The manager was out of reach for longer than the lease."""
    AGENT_ENDED = "agent_ended"
    """The agent of one of its VMs was restarted or upgraded."""
    LAUNCH_REFUSED = "launch_refused"
    UNREACHABLE = "unreachable"
    """Two of its VMs could not reach each other."""
    NOTICE = "notice"
    HANG = "hang"
    GROWTH = "growth"
    HANDED_OVER = "handed_over"
    """Its workers were to end one step in a shape that their script cannot follow. They have left, with their state for
    new processes."""
    SLOW_VM = "slow_vm"
    SHRUNK = "shrunk"
    """Other jobs need some of its GPUs more."""
    PREEMPTED = "preempted"
    """Jobs of higher priority need all of them."""
    LIMIT = "limit"
    """The job has reached one of its limits."""
    CANCELLED = "cancelled"


class StopMode(StrEnum):
    LEAVE_NOW = "leave_now"
    SAVE_FIRST = "save_first"
    HOLD_FIRST = "hold_first"
    """The workers finish the step and leave with the state in memory. If one of them cannot hold it, all save."""
    HOLD_WITHIN_STEP = "hold_within_step"
    """The same in the middle of the step, with what they have of it, if all of them can; else at its end."""


HOLDING_STOPS = frozenset({StopMode.HOLD_FIRST, StopMode.HOLD_WITHIN_STEP})
TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
STOPPED_WORKER_STATES = frozenset({WorkerState.EXITED, WorkerState.LOST})

Table = Mapping[str, frozenset[str]]

JOB_TRANSITIONS: Table = {
    # One that is only to be profiled may have its profile when it waits again.
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}),
    # A job that is preempted by one of higher priority returns to the queue.
    JobState.RUNNING: frozenset({JobState.QUEUED, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    # A retry goes on as the same job.
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}

GENERATION_TRANSITIONS: Table = {
    GenerationState.LAUNCHING: frozenset({GenerationState.RUNNING, GenerationState.STOPPING, GenerationState.ENDED}),
    GenerationState.RUNNING: frozenset({GenerationState.STOPPING, GenerationState.ENDED}),
    GenerationState.STOPPING: frozenset({GenerationState.ENDED}),
    GenerationState.ENDED: frozenset(),
}

VM_TRANSITIONS: Table = {
    VmState.REQUESTED: frozenset({VmState.READY, VmState.DRAINING, VmState.GONE}),
    VmState.READY: frozenset({VmState.SUSPECT, VmState.DRAINING, VmState.LOST, VmState.GONE}),
    VmState.SUSPECT: frozenset({VmState.READY, VmState.DRAINING, VmState.LOST, VmState.GONE}),
    # A drained host of a static provider stays, and may be used again.
    VmState.DRAINING: frozenset({VmState.READY, VmState.LOST, VmState.GONE}),
    VmState.LOST: frozenset({VmState.READY, VmState.DRAINING, VmState.GONE}),
    VmState.GONE: frozenset(),
}

WORKER_TRANSITIONS: Table = {
    WorkerState.ASSIGNED: frozenset({WorkerState.RUNNING, WorkerState.EXITED, WorkerState.LOST}),
    WorkerState.RUNNING: frozenset({WorkerState.EXITED, WorkerState.LOST}),
    WorkerState.EXITED: frozenset(),
    WorkerState.LOST: frozenset(),
}

HISTORY_LENGTH = 50
"""The number of entries in an object's history."""

S = TypeVar("S", bound=StrEnum)
History = Sequence[Mapping[str, Any]]


class IllegalTransitionError(RuntimeError):
    """A state change that its table does not allow."""

    def __init__(self, subject: str, old: str, new: str, history: History) -> None:
        story = "; ".join(f"{entry['at']:.3f} {entry['state']} ({entry['reason']})" for entry in history)
        super().__init__(f"{subject} cannot go from {old} to {new}; its history: {story or 'none'}")
        self.history = history


def advance(
    table: Table, subject: str, old: StrEnum, new: StrEnum, history: History, *, now: float, reason: str
) -> list[dict[str, Any]]:
    """The object's history with the change to `new` added.

    Raises IllegalTransitionError when the table has no way from `old` to `new`.
    """
    if new not in table[old]:
        raise IllegalTransitionError(subject, old, new, history)
    return [*map(dict, history), {"at": now, "state": new.value, "reason": reason}][-HISTORY_LENGTH:]
