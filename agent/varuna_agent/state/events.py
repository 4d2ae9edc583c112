"""What can happen to an agent."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.v1 import agent_pb2, worker_pb2


@dataclass(frozen=True)
class StreamOpened:
    """A stream to the manager is open; no message has passed on it yet."""


@dataclass(frozen=True)
class StreamClosed:
    reason: str


@dataclass(frozen=True)
class ManagerMessageReceived:
    message: agent_pb2.ManagerMessage


@dataclass(frozen=True)
class WorkerConnected:
    key: WorkerKey
    pid: int


@dataclass(frozen=True)
class WorkerDisconnected:
    """The worker's connection closed; its process may still run."""

    key: WorkerKey


@dataclass(frozen=True)
class WorkerMessageReceived:
    key: WorkerKey
    message: worker_pb2.WorkerMessage


@dataclass(frozen=True)
class ProcessEnded:
    """The worker and its whole process group are gone, and all its messages have been handled."""

    key: WorkerKey
    exit_code: int
    """As the process left it; negative: the signal."""
    log_tail: str


@dataclass(frozen=True)
class ProcessNotStarted:
    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class RendezvousPortOpened:
    """The agent holds this port for the next rank 0."""

    port: int


@dataclass(frozen=True)
class NoticeReceived:
    """The provider is going to take this VM away."""

    notice_id: str
    seconds_left: float
    source: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: `AgentState.next_deadline` is reached."""


@dataclass(frozen=True)
class TerminationRequested:
    """A signal asked the agent to leave."""

    reason: str
    keeps_memory: bool = False
    """Another process of the agent follows, which gets its memory files: workers leave their state there."""


@dataclass(frozen=True)
class WarmJobsChanged:
    """The state of the warmed processes has changed."""

    warming: frozenset[str]
    """Ids of the jobs whose workers would have to wait until a process has done their imports."""
    warm: frozenset[str] = frozenset()
    """Ids of the jobs whose workers would start at once."""


@dataclass(frozen=True)
class PreparationEnded:
    """The folder of a job's workers is ready on this VM, or has failed, or is no longer wanted."""

    job_id: str
    error: str = ""
    exit_code: int = 0
    """The setup's; 0: the setup was not run."""


@dataclass(frozen=True)
class StateStored:
    """The worker has put its state into a memory file, which the agent keeps."""

    key: WorkerKey
    step: int
    """The committed step."""
    bytes: int


Event = (
    StreamOpened
    | StreamClosed
    | ManagerMessageReceived
    | WorkerConnected
    | WorkerDisconnected
    | WorkerMessageReceived
    | ProcessEnded
    | ProcessNotStarted
    | RendezvousPortOpened
    | NoticeReceived
    | StateStored
    | Tick
    | TerminationRequested
    | WarmJobsChanged
    | PreparationEnded
)
