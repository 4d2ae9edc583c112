"""What the agent's state asks the runner to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna_agent.state.process_limits import NO_LIMITS, ProcessLimits
from varuna_agent.state.workdir import Workdir
from varuna_agent.state.worker_key import WorkerKey
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.v1 import agent_pb2, worker_pb2


@dataclass(frozen=True)
class SendMessage:
    """Send to the manager, on the open stream."""

    message: agent_pb2.AgentMessage


@dataclass(frozen=True)
class HangUp:
    """Give up the stream and dial again."""

    reason: str


@dataclass(frozen=True)
class AdmitWorker:
    """Give a connected worker the secret of its generation."""

    key: WorkerKey
    secret: str = field(repr=False)


@dataclass(frozen=True)
class StartWorker:
    key: WorkerKey
    environment: WorkerEnvironment
    """Without `agent_socket`, which is set where the process is started."""
    extra_environment: Mapping[str, str] = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)
    """Further variables, which the job names and the manager holds."""
    command: str
    workdir: Workdir
    rendezvous_port: int
    """The claimed port, held until this worker has ended; 0: none."""
    limits: ProcessLimits = NO_LIMITS


@dataclass(frozen=True)
class AssignWorker:
    """Give a surviving process its rank in the next generation; from now on it is the worker of that rank.

    `WorkerConnected` with the new key follows, or `ProcessNotStarted` if the process has already ended.
    """

    survivor: WorkerKey
    """The rank that the process has left."""
    start: StartWorker

    @property
    def key(self) -> WorkerKey:
        return self.start.key


@dataclass(frozen=True)
class AskToGive:
    """Have a surviving process give its state to a generation; its `GivingState` follows."""

    key: WorkerKey
    """The rank that the process has left."""
    environment: WorkerEnvironment
    """Of the generation that takes the state. Without `agent_socket`; with the secret, which is sent apart."""


@dataclass(frozen=True)
class SendLeave:
    """Send the worker the command to leave."""

    key: WorkerKey
    mode: agent_pb2.StopMode.ValueType
    reason: str
    keep_state: bool = False
    """The process may stay with its state, for the next generation."""
    in_place: bool = False
    """It is to go on in place there."""
    within_step: bool = False
    """It is to leave in the middle of its step."""
    spare: bool = False
    """It has no part in the next generation, in which others have the state that it has."""
    store_state: bool = False
    """Its state is to outlive the process: it leaves at once, and `SendStore` follows."""


@dataclass(frozen=True)
class SendAheadPart:
    """Tell a process its part in sending the state ahead."""

    key: WorkerKey
    part: worker_pb2.AheadPart


@dataclass(frozen=True)
class SendStore:
    """Have a process that has left its generation put its state into a memory file.

    `StateStored` and its end follow.
    """

    key: WorkerKey


@dataclass(frozen=True)
class FreeMemory:
    """Give up the memory file that the worker has left."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL the worker's process group; `ProcessEnded` follows."""

    key: WorkerKey
    reason: str


@dataclass(frozen=True)
class ClaimRendezvousPort:
    """Set the held port aside for a rank 0, and hold another; `RendezvousPortOpened` follows."""

    port: int


@dataclass(frozen=True)
class ReleaseRendezvousPort:
    """Let go of the claimed port: its rank 0 will not start, or has left its generation."""

    port: int


@dataclass(frozen=True)
class ReadLogs:
    """Read a part of a worker's log and send it."""

    request: agent_pb2.FetchLogs


@dataclass(frozen=True)
class ReadStacks:
    """Read where the threads of the worker's process stand and send that."""

    request_id: str
    key: WorkerKey
    pid: int
    """As the worker reported it; 0: it has not connected yet."""


@dataclass(frozen=True)
class PrepareJob:
    """Make the folder of the job's workers ready, then warm a process from which they start at once.

    `PreparationEnded` follows where the folder needs work.
    """

    request: agent_pb2.Prepare


@dataclass(frozen=True)
class CancelPreparation:
    """Stop making the job's folder ready; `PreparationEnded` follows."""

    job_id: str


@dataclass(frozen=True)
class KeepFolders:
    """Keep the folders of these jobs and of those with workers here; delete others when there are many."""

    job_ids: frozenset[str]


@dataclass(frozen=True)
class SaveSeenGenerations:
    """Write down the newest generation of each job for the agent's next start, before any other instruction."""

    seen: Mapping[str, int]


@dataclass(frozen=True)
class ExitAgent:
    code: int
    reason: str


Instruction = (
    SendMessage
    | HangUp
    | StartWorker
    | AssignWorker
    | AskToGive
    | AdmitWorker
    | SendLeave
    | SendAheadPart
    | SendStore
    | FreeMemory
    | KillWorker
    | ClaimRendezvousPort
    | ReleaseRendezvousPort
    | ReadLogs
    | ReadStacks
    | PrepareJob
    | CancelPreparation
    | KeepFolders
    | SaveSeenGenerations
    | ExitAgent
)
