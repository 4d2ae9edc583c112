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
    retried_at: Mapped[float | None]
    """When it was last retried: its limits count from there. Null: from its submission."""
    run_since: Mapped[float | None]
    """When it first started since then."""
    deleted_at: Mapped[float | None]
    """Since then nobody sees it, and what belongs to it is deleted little by little; its row goes last."""
    setup_failures: Mapped[dict[str, Any] | None]
    """By VM where that failed: how often (`times`), the setup's `exit_code`, null when it did not come to that, and the
    number of the `report` that said so last."""
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - SQLAlchemy's own way

    def subject(self) -> str:
        return f"job {self.name!r} ({self.id})"

    @property
    def job_state(self) -> JobState:
        return JobState(self.state)


class GenerationRow(_Living, Base):
    __tablename__ = "generations"
    __table_args__ = (
        UniqueConstraint("job_id", "number", name="uq_generations_job_id_number"),
        Index("ix_generations_ended_at", "ended_at"),
    )
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
    secret: Mapped[str | None]
    """By which its workers know each other, as long as it lives; goes to them, in Launch, and nowhere else."""
    committed_step: Mapped[int | None]
    """Of the newest checkpoint that the job had when it was made; null: none, or it is of an earlier version."""
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
    save_s: Mapped[float | None]
    """What its slowest rank took to save and leave, by its agent's clock; null: none was told to, or did."""
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


class JobProgressRow(Base):
    """A job's generations summed up (`db.job_progress` keeps it): a look asks it, not thousands of rows.

    Numbers of generations are 0 where there is no such generation.
    """

    __tablename__ = "job_progress"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    newest: Mapped[int] = mapped_column(Integer)
    trained: Mapped[int] = mapped_column(Integer)
    """The newest that trains."""
    stepped: Mapped[int] = mapped_column(Integer)
    """The newest that has completed a step."""
    step: Mapped[int]
    """The newest that any has completed."""
    step_at: Mapped[float]
    """When a step was last completed."""
    stalled_s: Mapped[float]
    """Seconds without progress, of all."""
    steps_redone: Mapped[int]
    changes: Mapped[int]
    """Grows whenever something of an ended generation changes."""
    billed: Mapped[int] = mapped_column(Integer, default=0)
    """What generations up to this number have used is in `JobVmRow`; what later ones have used is not."""


class JobVmRow(Base):
    """What a job's ended generations have used of a VM (`db.job_vms` keeps it): a bill does not ask each of them."""

    __tablename__ = "job_vms"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    vm_id: Mapped[str] = mapped_column(primary_key=True)
    gpu_seconds: Mapped[float]


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
    unreached: Mapped[int | None]
    """The rank that it could not reach when they met."""
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
        Index("ix_vms_gone_at", "gone_at"),
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
    gone_at: Mapped[float | None]
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
    deaths: Mapped[int] = mapped_column(Integer, default=0)
    """Generations that workers there have ended, each not long after the one before (`domain.blame`)."""
    last_death_at: Mapped[float | None]
    cordoned_at: Mapped[float | None]
    """Since when nothing new starts there, because a user said so; null: it may."""
    request: Mapped[str | None]
    """Tag of the request that it was made for."""
    gpu_type: Mapped[str | None]
    """What its GPUs are called, as its agent says."""
    price_per_hour: Mapped[float | None]
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    def subject(self) -> str:
        return f"VM {self.id}"

    def move(self, new: StrEnum, *, now: float, reason: str) -> None:
        super().move(new, now=now, reason=reason)
        if new is VmState.GONE:
            self.gone_at = now

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


class WebhookCursorRow(Base):
    """One row, of id 1: the last event that webhooks are done with."""

    __tablename__ = "webhook_cursor"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    event_id: Mapped[int]


class CheckpointRow(Base):
    __tablename__ = "checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    url: Mapped[str] = mapped_column(Text)
    total_bytes: Mapped[int]
    at: Mapped[float]


class ArchiveRow(Base):
    """A packed workdir whose bytes are here as a whole."""

    __tablename__ = "archives"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    total_bytes: Mapped[int]
    created_at: Mapped[float]


class ArchiveChunkRow(Base):
    """A part of a packed workdir, where managers share the store; or one that an earlier version has put here."""

    __tablename__ = "archive_chunks"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class StackRow(Base):
    """Where a rank of a generation that hung stood."""

    __tablename__ = "stacks"
    __table_args__ = (Index("ix_stacks_at", "at"),)

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
    __table_args__ = (Index("ix_traces_at", "at"),)

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


class FleetDayRow(Base):
    """What VMs whose rows were deleted did on one day (UTC), so that what the fleet has cost is never forgotten."""

    __tablename__ = "fleet_days"

    day: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """Since the epoch."""
    vm_hours: Mapped[float]
    gpu_hours: Mapped[float]
    cost: Mapped[float]
    """Of those with a price."""
    gone: Mapped[int]
    """VMs that went on this day."""
    gone_with_price: Mapped[int]


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
