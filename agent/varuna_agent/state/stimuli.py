"""What can happen to an agent (events) and what it can be told to do about it (instructions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna_agent.state.limits import NO_LIMITS, JobLimits
from varuna_agent.state.workdir import Workdir
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.v1 import agent_pb2, worker_pb2


@dataclass(frozen=True, order=True)
class WorkerKey:
    """One worker: a rank of a generation of a job."""

    job_id: str
    generation: int
    rank: int

    @property
    def generation_key(self) -> tuple[str, int]:
        return self.job_id, self.generation

    def fields(self) -> dict[str, str | int]:
        """For the log."""
        return {"job": self.job_id, "generation": self.generation, "rank": self.rank}

    def __str__(self) -> str:
        return f"{self.job_id}/g{self.generation}/rank{self.rank}"


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class StreamOpened:
    """A stream to the manager is there; nothing has been said on it yet."""


@dataclass(frozen=True)
class StreamClosed:
    reason: str


@dataclass(frozen=True)
class ManagerSaid:
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
class WorkerSaid:
    key: WorkerKey
    message: worker_pb2.WorkerMessage


@dataclass(frozen=True)
class ProcessEnded:
    """The worker and its whole process group are gone, and all that it said has been handled."""

    key: WorkerKey
    exit_code: int
    """As the process left it; negative: the signal."""
    log_tail: str


@dataclass(frozen=True)
class ProcessNotStarted:
    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class RendezvousOpened:
    port: int


@dataclass(frozen=True)
class NoticeSeen:
    """The provider is going to take this VM away."""

    notice_id: str
    seconds_left: float
    source: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: `AgentState.next_deadline` is reached."""


@dataclass(frozen=True)
class Terminate:
    """Someone on this VM asked the agent to leave."""

    reason: str


@dataclass(frozen=True)
class Preparing:
    """The jobs whose workers would have to wait here, for imports that are being done, or would start at once, have
    changed."""

    job_ids: frozenset[str]
    warm: frozenset[str] = frozenset()
    """Those whose workers would start at once."""


@dataclass(frozen=True)
class Prepared:
    """The folder of a job's workers is ready on this VM, or cannot be made so, or is not wanted any more."""

    job_id: str
    error: str = ""
    exit_code: int = 0
    """Of the setup; 0: it did not come to that."""


Event = (
    StreamOpened
    | StreamClosed
    | ManagerSaid
    | WorkerConnected
    | WorkerDisconnected
    | WorkerSaid
    | ProcessEnded
    | ProcessNotStarted
    | RendezvousOpened
    | NoticeSeen
    | Tick
    | Terminate
    | Preparing
    | Prepared
)

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Send:
    """To the manager, on the stream that is open."""

    message: agent_pb2.AgentMessage


@dataclass(frozen=True)
class HangUp:
    """Give up the stream and dial again."""

    reason: str


@dataclass(frozen=True)
class AdmitWorker:
    """Give a worker that has connected the secret of its generation."""

    key: WorkerKey
    secret: str = field(repr=False)


@dataclass(frozen=True)
class StartWorker:
    key: WorkerKey
    environment: WorkerEnvironment
    """Without agent_socket and rendezvous_fd: those are for whoever starts the process."""
    extra_environment: Mapping[str, str] = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)
    """Further variables, which the job names and the manager has."""
    command: str
    workdir: Workdir
    rendezvous_port: int
    """The claimed port whose socket this worker inherits; 0: none."""
    limits: JobLimits = NO_LIMITS


@dataclass(frozen=True)
class TellWorkerToLeave:
    key: WorkerKey
    mode: agent_pb2.StopMode.ValueType
    reason: str


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL the worker's process group; `ProcessEnded` follows."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class ClaimRendezvous:
    """Set the held socket with this port aside for a rank 0, and open another; `RendezvousOpened` follows."""

    port: int


@dataclass(frozen=True)
class ReleaseRendezvous:
    """Close the claimed socket: its rank 0 will not start."""

    port: int


@dataclass(frozen=True)
class ReadLogs:
    request: agent_pb2.FetchLogs


@dataclass(frozen=True)
class ReadStacks:
    """Ask the worker's process where it stands, and send that."""

    request_id: str
    key: WorkerKey
    pid: int
    """What the worker says that it is; 0: it has not said so yet."""


@dataclass(frozen=True)
class Prepare:
    """Make the folder of such workers ready, where there is something to make, and then have a process at hand from
    which they start at once. Where there is, `Prepared` follows."""

    request: agent_pb2.Prepare


@dataclass(frozen=True)
class CancelPrepare:
    """The folder of the job is not wanted any more; `Prepared` follows."""

    job_id: str


@dataclass(frozen=True)
class KeepFolders:
    """The folders of these jobs, and of those that have workers here, stay; others may go when there are many."""

    job_ids: frozenset[str]


@dataclass(frozen=True)
class Remember:
    """Keep the newest generation of each job for the agent's next start: before anything else is done about them."""

    seen: Mapping[str, int]


@dataclass(frozen=True)
class ExitAgent:
    code: int
    reason: str


Instruction = (
    Send
    | HangUp
    | StartWorker
    | AdmitWorker
    | TellWorkerToLeave
    | KillWorker
    | ClaimRendezvous
    | ReleaseRendezvous
    | ReadLogs
    | ReadStacks
    | Prepare
    | CancelPrepare
    | KeepFolders
    | Remember
    | ExitAgent
)
