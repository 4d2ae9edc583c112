"""The states of jobs, generations, VMs and workers, and which may follow which.

Everything that may change a state goes through `advance`, which knows the tables below. A state that is not a key's
successor is a bug somewhere: it raises with the object's history, so that the bug can be read from the log.
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
    """The provider was asked; its agent has not said Hello yet."""
    READY = "ready"
    SUSPECT = "suspect"
    """Heartbeats are missing: nothing new is launched there."""
    DRAINING = "draining"
    """It is about to leave (notice, or fleet target lowered)."""
    LOST = "lost"
    """Silent for so long that its workers are given up; the provider still lists it."""
    GONE = "gone"
    """The provider no longer has it: nothing runs there."""


class WorkerState(StrEnum):
    ASSIGNED = "assigned"
    RUNNING = "running"
    EXITED = "exited"
    """Its agent said so."""
    LOST = "lost"
    """It went with its VM."""


class GenerationKind(StrEnum):
    CALIBRATION = "calibration"
    TRAINING = "training"


class ExitCause(StrEnum):
    """Why a worker stopped; the agent protocol's causes, and the loss of its VM."""

    FINISHED = "finished"
    GENERATION_ENDED = "generation_ended"
    PEER_LOST = "peer_lost"
    SCRIPT_FAILED = "script_failed"
    KILLED = "killed"
    LAUNCH_FAILED = "launch_failed"
    LAUNCH_REFUSED = "launch_refused"
    """Its agent would not start it."""
    LEASE_OVER = "lease_over"
    """Its agent ended it, which had not heard from the manager for a whole lease."""
    AGENT_ENDED = "agent_ended"
    """It went with its agent, which was asked to end or started anew."""
    VM_GONE = "vm_gone"


class EndCause(StrEnum):
    """Why a generation ended (or is being stopped)."""

    FINISHED = "finished"
    PROFILED = "profiled"
    SCRIPT_FAILED = "script_failed"
    WORKER_FAILED = "worker_failed"
    VM_LOST = "vm_lost"
    MANAGER_AWAY = "manager_away"
    """For longer than the lease."""
    AGENT_ENDED = "agent_ended"
    """Somebody restarted or upgraded the agent of one of its VMs."""
    LAUNCH_REFUSED = "launch_refused"
    UNREACHABLE = "unreachable"
    """Two of its VMs did not reach each other."""
    NOTICE = "notice"
    HANG = "hang"
    GROWTH = "growth"
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


TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
STOPPED_WORKER_STATES = frozenset({WorkerState.EXITED, WorkerState.LOST})

Table = Mapping[str, frozenset[str]]

JOB_TRANSITIONS: Table = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLING, JobState.FAILED}),
    # Back to the queue goes who was preempted by a job of higher priority.
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
    # A host of one's own stays when it was drained, and may be used again.
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
"""Entries that an object keeps of its own past."""

S = TypeVar("S", bound=StrEnum)
History = Sequence[Mapping[str, Any]]


class IllegalTransitionError(RuntimeError):
    """A state change that no table allows."""

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
