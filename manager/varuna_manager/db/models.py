"""The tables. Times are seconds since the epoch (UTC); documents are JSON.

Rows with a life of states carry a `version` (a concurrent writer's update fails instead of overwriting) and their own
`history`. Progress (steps, loss) changes with every report and is written without the version: see `GenerationRow`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from varuna_manager.domain.states import (
    GENERATION_TRANSITIONS,
    JOB_TRANSITIONS,
    VM_TRANSITIONS,
    WORKER_TRANSITIONS,
    EndCause,
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    Table,
    VmState,
    WorkerState,
    advance,
)

# SQLite numbers rows by itself only where the key is a plain INTEGER.
_BigId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: String(255),
        float: Float(53),
        int: BigInteger,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
    }


class _Living:
    """A row whose `state` follows a transition table."""

    _table: ClassVar[Table]
    _states: ClassVar[type[StrEnum]]
    state: Mapped[str]
    history: Mapped[list[dict[str, Any]]] = mapped_column(default=list)

    def subject(self) -> str:
        raise TypeError(f"{type(self).__name__} does not say what it is")

    def move(self, new: StrEnum, *, now: float, reason: str) -> None:
        """Go to the state `new`. Raises IllegalTransitionError with this row's history."""
        old = self._states(self.state)
        self.history = advance(self._table, self.subject(), old, new, self.history, now=now, reason=reason)
        self.state = new.value


class JobRow(_Living, Base):
    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_created_at_id", "created_at", "id"),)
    _table = JOB_TRANSITIONS
    _states = JobState

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    active_name: Mapped[str | None] = mapped_column(unique=True)
    """The name while the job is not over: no two such jobs share one."""
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    spec: Mapped[dict[str, Any]]
    error: Mapped[str | None] = mapped_column(Text)
    reason: Mapped[str | None] = mapped_column(Text)
    """Of the last decision; an event is written when it changes."""
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    checkpoint_url: Mapped[str | None] = mapped_column(Text)
    """Where its checkpoints are, set when it was submitted: the next leader's folders are others. Null in old rows."""
    profile_json: Mapped[str | None] = mapped_column(Text)
    profiled_at: Mapped[float | None]
    profile_error: Mapped[str | None] = mapped_column(Text)
    """Why the newest measured profile was rejected."""
    exit_code: Mapped[int | None] = mapped_column(Integer)
    """Of the script, when the job is over and it is known (negative: the signal that ended it); 0: it succeeded."""
    retried_after: Mapped[int | None] = mapped_column(Integer)
    """The newest generation when the job was last retried: what came before is not held against it."""
    cancel_saves: Mapped[bool] = mapped_column(Boolean, default=False)
    """Whether it is cancelled with a last checkpoint."""
    archive: Mapped[str | None]
    """SHA-256 of its packed workdir; null: that is on the VMs already."""
    setup_error: Mapped[str | None] = mapped_column(Text)
    """Why its workdir could not be made ready on a VM, as it was said last."""
    setup_exit_code: Mapped[int | None] = mapped_column(Integer)
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - SQLAlchemy's own way

    def subject(self) -> str:
        return f"job {self.name!r} ({self.id})"

    @property
    def job_state(self) -> JobState:
        return JobState(self.state)


class GenerationRow(_Living, Base):
    __tablename__ = "generations"
    __table_args__ = (UniqueConstraint("job_id", "number", name="uq_generations_job_id_number"),)
    _table = GENERATION_TRANSITIONS
    _states = GenerationState

    id: Mapped[int] = mapped_column(_BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    number: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str]
    plan: Mapped[dict[str, Any]]
    candidates: Mapped[list[dict[str, Any]]]
    rendezvous_host: Mapped[str]
    rendezvous_port: Mapped[int] = mapped_column(Integer)
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    ended_at: Mapped[float | None]
    end_cause: Mapped[str | None]
    end_reason: Mapped[str | None] = mapped_column(Text)
    stop_mode: Mapped[str | None]
    stop_cause: Mapped[str | None]
    stop_reason: Mapped[str | None] = mapped_column(Text)
    stop_requested_at: Mapped[float | None]
    # Progress: written by plain UPDATEs as reports come, so that steps do not make decisions stale.
    started_at: Mapped[float | None]
    """When its first step was completed."""
    resumed_step: Mapped[int | None]
    last_step: Mapped[int | None]
    last_loss: Mapped[float | None]
    last_step_at: Mapped[float | None]
    seconds_without_progress: Mapped[float | None]
    steps_redone: Mapped[int | None]
    downtime: Mapped[list[dict[str, Any]] | None]
    """What the time without progress went to (`domain.downtime.Part`); before the first step: its slowest rank's."""
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    def subject(self) -> str:
        return f"generation {self.number} of job {self.job_id}"

    @property
    def generation_state(self) -> GenerationState:
        return GenerationState(self.state)

    @property
    def generation_kind(self) -> GenerationKind:
        return GenerationKind(self.kind)

    @property
    def mode_of_stop(self) -> StopMode | None:
        return None if self.stop_mode is None else StopMode(self.stop_mode)

    @property
    def cause_of_end(self) -> EndCause | None:
        return None if self.end_cause is None else EndCause(self.end_cause)


class WorkerRow(_Living, Base):
    __tablename__ = "workers"
    __table_args__ = (Index("ix_workers_state_job_id_generation", "state", "job_id", "generation"),)
    _table = WORKER_TRANSITIONS
    _states = WorkerState

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    vm_id: Mapped[str] = mapped_column(index=True)
    local_rank: Mapped[int] = mapped_column(Integer)
    pid: Mapped[int | None]
    resumed_step: Mapped[int | None]
    cause: Mapped[str | None]
    exit_code: Mapped[int | None] = mapped_column(Integer)
    error_text: Mapped[str | None] = mapped_column(Text)
    stopped_at: Mapped[float | None]

    def subject(self) -> str:
        return f"rank {self.rank} of generation {self.generation} of job {self.job_id}"

    @property
    def worker_state(self) -> WorkerState:
        return WorkerState(self.state)

    @property
    def exit_cause(self) -> ExitCause | None:
        return None if self.cause is None else ExitCause(self.cause)


class VmRow(_Living, Base):
    __tablename__ = "vms"
    __table_args__ = (
        Index("ix_vms_state_id_version", "state", "id", "version"),
        Index("ix_vms_created_at_id", "created_at", "id"),
    )
    _table = VM_TRANSITIONS
    _states = VmState

    id: Mapped[str] = mapped_column(primary_key=True)
    provider: Mapped[str]
    gpus: Mapped[int] = mapped_column(Integer)
    device_memory_bytes: Mapped[int | None]
    host: Mapped[str | None]
    ref: Mapped[dict[str, Any]]
    incarnation: Mapped[str | None]
    created_at: Mapped[float]
    reason: Mapped[str | None] = mapped_column(Text)
    notice_id: Mapped[str | None]
    notice_deadline: Mapped[float | None]
    slow_ratio: Mapped[float | None]
    """How many times as long as its peers it takes, as long as it is found slow."""
    slow_reason: Mapped[str | None] = mapped_column(Text)
    quarantined_until: Mapped[float | None]
    quarantines: Mapped[int] = mapped_column(Integer, default=0)
    """How often it was quarantined: each one lasts longer."""
    drain_deadline: Mapped[float | None]
    """When whoever drained it wants it to be empty."""
    hangs: Mapped[int] = mapped_column(Integer, default=0)
    """Hangs in which its rank was the one that the others waited for."""
    request: Mapped[str | None]
    """Tag of the request that it was made for."""
    price_per_hour: Mapped[float | None]
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    def subject(self) -> str:
        return f"VM {self.id}"

    @property
    def vm_state(self) -> VmState:
        return VmState(self.state)


class EventRow(Base):
    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_job_id_id", "job_id", "id"),
        Index("ix_events_vm_id_id", "vm_id", "id"),
        Index("ix_events_kind_id", "kind", "id"),
        Index("ix_events_at", "at"),
    )

    id: Mapped[int] = mapped_column(_BigId, primary_key=True, autoincrement=True)
    at: Mapped[float]
    job_id: Mapped[str | None]
    generation: Mapped[int | None] = mapped_column(Integer)
    vm_id: Mapped[str | None]
    kind: Mapped[str]
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]]


class CheckpointRow(Base):
    __tablename__ = "checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    url: Mapped[str] = mapped_column(Text)
    total_bytes: Mapped[int]
    at: Mapped[float]


class ArchiveRow(Base):
    """A packed workdir. Its chunks are there before it is."""

    __tablename__ = "archives"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    total_bytes: Mapped[int]
    created_at: Mapped[float]


class ArchiveChunkRow(Base):
    __tablename__ = "archive_chunks"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class StackRow(Base):
    """Where a rank of a generation that hung stood."""

    __tablename__ = "stacks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    vm_id: Mapped[str]
    at: Mapped[float]
    text: Mapped[str] = mapped_column(Text)
    error: Mapped[str] = mapped_column(Text)
    """Why there is no text; else empty."""


class MetricRow(Base):
    """One step; a later generation that does a step again overwrites it, an older one never does."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    loss: Mapped[float | None]
    """Null where it was not a number: neither SQLite nor JSON can hold a NaN."""
    step_s: Mapped[float]
    examples: Mapped[int]
    generation: Mapped[int] = mapped_column(Integer)
    at: Mapped[float]


class MetricBlockRow(Base):
    """So many steps together, for charts: see `varuna_manager.services.step_metrics`."""

    __tablename__ = "metric_blocks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_step: Mapped[int]
    last_step: Mapped[int]
    steps: Mapped[int]
    at: Mapped[float]
    """Of the newest."""
    generation: Mapped[int] = mapped_column(Integer)
    """The newest."""
    losses: Mapped[int]
    """Steps whose loss is a number."""
    loss_sum: Mapped[float | None]
    loss_min: Mapped[float | None]
    loss_max: Mapped[float | None]
    step_s_sum: Mapped[float]
    step_s_min: Mapped[float]
    step_s_max: Mapped[float]
    examples: Mapped[int]
    rate_min: Mapped[float | None]
    """Examples per second of one step."""
    rate_max: Mapped[float | None]


class TraceRow(Base):
    """What a stage did in the newest mini-batch of its generation that was traced."""

    __tablename__ = "traces"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    step: Mapped[int]
    at: Mapped[float]
    begin_us: Mapped[float]
    """Of its first op, by its machine's clock: seconds since the epoch, in µs."""
    spans: Mapped[dict[str, Any]]


class FleetRow(Base):
    """How many VMs are wanted of a provider."""

    __tablename__ = "fleet"

    provider: Mapped[str] = mapped_column(primary_key=True)
    target: Mapped[int] = mapped_column(Integer)
    min_vms: Mapped[int | None] = mapped_column(Integer)
    max_vms: Mapped[int | None] = mapped_column(Integer)
    """With both, the target follows the jobs' wants between them; null: it stays as it was set."""
    request: Mapped[str | None]
    """Tag of the request that the provider may be at: written before it is asked."""
    request_count: Mapped[int | None] = mapped_column(Integer)


class TokenRow(Base):
    """A bearer token of the REST API (`role`), or one with which an agent joins (`role` null)."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str | None]
    secret_sha256: Mapped[str]
    created_at: Mapped[float]
    created_by: Mapped[str]
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    single_use: Mapped[bool]
    vm_id: Mapped[str | None]
    """The only VM that may join with it; null: any that has not joined yet."""


class EnrolmentRow(Base):
    """The agent of a VM that has joined; joining again replaces it, and with it all certificates of before."""

    __tablename__ = "enrolments"

    vm_id: Mapped[str] = mapped_column(primary_key=True)
    enrolment: Mapped[str]
    token_id: Mapped[str]
    key_sha256: Mapped[str]
    """Of the key that it joined with."""
    joined_at: Mapped[float]
    revoked_at: Mapped[float | None]


class AuditRow(Base):
    """A call that changes something: who, what, from where, and the answer (null: it is not known)."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(_BigId, primary_key=True, autoincrement=True)
    at: Mapped[float]
    who: Mapped[str]
    role: Mapped[str | None]
    address: Mapped[str]
    action: Mapped[str] = mapped_column(Text)
    status: Mapped[int | None] = mapped_column(Integer)


class LeadershipRow(Base):
    """Which manager leads: one row, with id 1. Used on PostgreSQL only; an SQLite store has a lock on its file."""

    __tablename__ = "leadership"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    holder: Mapped[str]
    epoch: Mapped[int]
    """Grows with every change of the leader; no two leaders have the same."""
    expires_at: Mapped[float]
    """By the database's clock."""
    http_url: Mapped[str]
    grpc_address: Mapped[str]
