"""The tables. Times are seconds since the epoch (UTC); documents are JSON.

Rows with states carry a `version` (a concurrent writer's update fails instead of overwriting) and their own `history`.
Progress (steps, loss) changes with every report and is written without the version: see `GenerationRow`.
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

# SQLite assigns a row's number only if the key is a plain INTEGER.
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

    def render_subject(self) -> str:
        raise TypeError(f"{type(self).__name__} does not say what it is")

    def move_to_state(self, new: StrEnum, *, now: float, reason: str) -> None:
        """Go to the state `new`. Raises IllegalTransitionError with this row's history."""
        old = self._states(self.state)
        self.history = advance(self._table, self.render_subject(), old, new, self.history, now=now, reason=reason)
        self.state = new.value


class JobRow(_Living, Base):
    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_created_at_id", "created_at", "id"),)
    _table = JOB_TRANSITIONS
    _states = JobState

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    active_name: Mapped[str | None] = mapped_column(unique=True)
    """The job's name until it is over: no two such jobs share one."""
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    spec: Mapped[dict[str, Any]]
    error: Mapped[str | None] = mapped_column(Text)
    reason: Mapped[str | None] = mapped_column(Text)
    """The last decision's; an event is written when it changes."""
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    checkpoint_url: Mapped[str | None] = mapped_column(Text)
    """Where its checkpoints are, fixed at submission, because another leader has other folders. Null in old rows."""
    profile_json: Mapped[str | None] = mapped_column(Text)
    profiled_at: Mapped[float | None]
    profile_error: Mapped[str | None] = mapped_column(Text)
    """Why the newest measured profile was rejected."""
    exit_code: Mapped[int | None] = mapped_column(Integer)
    """The script's, if the job is over and it is known. Negative: the signal that ended it."""
    retried_after: Mapped[int | None] = mapped_column(Integer)
    """The newest generation at the last retry. Earlier ones do not count against the job."""
    cancel_saves: Mapped[bool] = mapped_column(Boolean, default=False)
    """Whether it saves a last checkpoint when it is cancelled."""
    archive: Mapped[str | None]
    """SHA-256 of its packed workdir; null: the workdir is on the VMs already."""
    setup_error: Mapped[str | None] = mapped_column(Text)
    """The last reason why its workdir could not be made ready on a VM."""
    setup_exit_code: Mapped[int | None] = mapped_column(Integer)
    retried_at: Mapped[float | None]
    """When it was last retried: its limits count from there. Null: from its submission."""
    run_since: Mapped[float | None]
    """When it first started after that."""
    deleted_at: Mapped[float | None]
    """From then on the job is hidden. What belongs to it is deleted in batches, and its row last."""
    setup_failures: Mapped[dict[str, Any] | None]
    """By VM where the workdir could not be made ready: how often (`times`), the setup's `exit_code` (null: it did not
    end), and the number of the last `report` of it."""
    script_obstacles: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """What its script does that keeps its workers from going on in place, as far as events have been emitted for it."""
    memory_margin: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """By how much its plans allow for more memory than its profile says (`domain.memory_margin`). Null: by nothing."""
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy requires

    def render_subject(self) -> str:
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
    """By which its workers authenticate each other. It is sent only to them, in Launch."""
    committed_step: Mapped[int | None]
    """The job's newest checkpoint when the generation was made. Null: none, or in rows of an earlier version."""
    in_place: Mapped[bool] = mapped_column(Boolean, default=False)
    """Whether its ranks are survivors of the generation before, which keep their processes and their state."""
    holders_generation: Mapped[int | None] = mapped_column(Integer)
    """The generation whose processes give it their state. Null: it goes on in place, or from a checkpoint."""
    holders: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    """Those processes (`domain.observed.Holder`)."""
    keepers: Mapped[list[int] | None] = mapped_column(JSON(none_as_null=True))
    """By stage: the rank that keeps a copy of its state (`domain.keepers`). Null: no copies are kept."""
    copies_shares: Mapped[bool | None] = mapped_column(Boolean)
    """Whether its ranks copy the sums of long steps. Null in rows of an earlier version: as the job file says."""
    copies_reason: Mapped[str | None] = mapped_column(Text)
    """Why it keeps copies or keeps none, with the figures. Null: the job file decides, or there was no choice."""
    created_at: Mapped[float]
    ended_at: Mapped[float | None]
    end_cause: Mapped[str | None]
    end_reason: Mapped[str | None] = mapped_column(Text)
    stop_mode: Mapped[str | None]
    stop_cause: Mapped[str | None]
    stop_reason: Mapped[str | None] = mapped_column(Text)
    stop_requested_at: Mapped[float | None]
    running_at: Mapped[float | None]
    """When all its ranks had started, with their state. Null: they have not, or an earlier version wrote the row."""
    # Progress: written by plain UPDATEs as reports arrive, so that steps do not make decisions stale.
    started_at: Mapped[float | None]
    """When its first step was completed."""
    resumed_step: Mapped[int | None]
    last_step: Mapped[int | None]
    last_loss: Mapped[float | None]
    """Null: it is not finite, or there is no step."""
    not_finite_from: Mapped[int | None]
    """The first of its newest steps in a row without a finite loss or gradient, perhaps of the generation before. Null:
    the newest step's are finite."""
    steps_skipped: Mapped[int] = mapped_column(default=0)
    """The job's steps up to its newest that updated nothing, because their loss or gradient was not finite. A step that
    is done again counts again."""
    last_step_at: Mapped[float | None]
    copied_step: Mapped[int | None]
    """The newest step that other VMs keep a copy of, for every stage. Null: none is known."""
    copies_obstacle: Mapped[str | None] = mapped_column(Text)
    """Why its workers keep no copies of states, though it has keepers. Null: nothing is known against it."""
    marks_obstacle: Mapped[str | None] = mapped_column(Text)
    """The same for copies of the sums of long steps."""
    seconds_without_progress: Mapped[float | None]
    steps_redone: Mapped[int | None]
    micro_batches_redone: Mapped[int | None]
    """Of the step that was under way in the generation before. Null: unknown, as in all that do not go on in place."""
    micro_batches_left: Mapped[int | None]
    """Of that step, those that it ran. Null: unknown, as in all that do not go on in place."""
    save_s: Mapped[float | None]
    """How long its slowest rank took to save and leave, by its agent's clock. Null: none did."""
    downtime: Mapped[list[dict[str, Any]] | None]
    """How the time without progress was spent (`domain.downtime.Part`). Before the first step: its slowest rank's."""
    between_s: Mapped[dict[str, float] | None] = mapped_column(JSON(none_as_null=True))
    """Seconds between its steps after the first, by cause (`domain.accounting.BETWEEN_STEPS`). Null: unknown."""
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    def render_subject(self) -> str:
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
    """Totals of a job's generations (`db.job_progress` maintains them), so that no look reads thousands of rows.

    Numbers of generations are 0 where there is no such generation.
    """

    __tablename__ = "job_progress"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    newest: Mapped[int] = mapped_column(Integer)
    trained: Mapped[int] = mapped_column(Integer)
    """The newest that has trained."""
    stepped: Mapped[int] = mapped_column(Integer)
    """The newest that has completed a step."""
    step: Mapped[int]
    """The newest step of any generation, completed or resumed from."""
    step_at: Mapped[float]
    """When a step was last completed."""
    stalled_s: Mapped[float]
    """Seconds without progress, over all generations."""
    steps_redone: Mapped[int]
    changes: Mapped[int]
    """Grows whenever an ended generation changes."""
    billed: Mapped[int] = mapped_column(Integer, default=0)
    """`JobVmRow` contains the usage of generations up to this number."""


class JobVmRow(Base):
    """What a job's ended generations have used of a VM (`db.job_vms` maintains it), so that a bill reads few rows."""

    __tablename__ = "job_vms"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    vm_id: Mapped[str] = mapped_column(primary_key=True)
    gpu_seconds: Mapped[float]
    priced_gpu_seconds: Mapped[float] = mapped_column(default=0.0)
    """Those whose price stays. The others count at the VM's present price: it had none when they were added, or an
    earlier version added them."""
    seconds_times_price: Mapped[float] = mapped_column(default=0.0)
    """Sum over the priced GPU-seconds of the price per hour that the VM had then."""


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
    kept_bytes: Mapped[int | None]
    """State that its process has kept from the generation before."""
    peer_bytes: Mapped[int | None]
    """State that came from the memory of other processes before it trained."""
    late_bytes: Mapped[int | None]
    """State that came from there while it trained."""
    store_bytes: Mapped[int | None]
    """State that came from a checkpoint."""
    cause: Mapped[str | None]
    exit_code: Mapped[int | None] = mapped_column(Integer)
    error_text: Mapped[str | None] = mapped_column(Text)
    unreached: Mapped[int | None]
    """The rank that it could not reach at the rendezvous."""
    held_step: Mapped[int | None]
    """The step of the state that its process holds for the next generation. Null: it runs, or its process is gone."""
    held_bytes: Mapped[int | None]
    held_gives_only: Mapped[bool] = mapped_column(Boolean, default=False)
    """Whether its process can only give that state to others, and cannot go on in place."""
    held_copies: Mapped[list[list[int]] | None] = mapped_column(JSON(none_as_null=True))
    """The rank and the step of each copy that its process held besides. Null: none."""
    shortage: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """What its device had when it ran out of memory. Null: it did not."""
    stopped_at: Mapped[float | None]

    def render_subject(self) -> str:
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
    """How many times as long as its peers it takes; null: it is not slow."""
    slow_reason: Mapped[str | None] = mapped_column(Text)
    quarantined_until: Mapped[float | None]
    quarantines: Mapped[int] = mapped_column(Integer, default=0)
    """How often it was quarantined. Each quarantine lasts longer."""
    drain_deadline: Mapped[float | None]
    """When it is to be empty, as the operator who drained it asked."""
    drained_at: Mapped[float | None]
    """When an operator drained it; null: nobody did, or it is used again."""
    hangs: Mapped[int] = mapped_column(Integer, default=0)
    """Hangs in which the other ranks waited for its rank."""
    deaths: Mapped[int] = mapped_column(Integer, default=0)
    """Generations that its workers have ended, each soon after the one before (`domain.blame`)."""
    last_death_at: Mapped[float | None]
    cordoned_at: Mapped[float | None]
    """When a user cordoned it: nothing new starts there. Null: it is not cordoned."""
    request: Mapped[str | None]
    """Tag of the request that created it."""
    gpu_type: Mapped[str | None]
    """The model of its GPUs, as its agent reports it."""
    price_per_hour: Mapped[float | None]
    priced_since: Mapped[float | None]
    """Since when it has this price; null: it never had another."""
    pool: Mapped[str | None]
    """The pool of the fleet's settings that it belongs to."""
    zone: Mapped[str | None]
    machine_type: Mapped[str | None]
    version: Mapped[int] = mapped_column(Integer)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    def render_subject(self) -> str:
        return f"VM {self.id}"

    def move_to_state(self, new: StrEnum, *, now: float, reason: str) -> None:
        super().move_to_state(new, now=now, reason=reason)
        if new is VmState.GONE:
            self.gone_at = now

    @property
    def vm_state(self) -> VmState:
        return VmState(self.state)


class VmPriceRow(Base):
    """A price that a VM had before its present one (`db.vm_prices` maintains it)."""

    __tablename__ = "vm_prices"

    vm_id: Mapped[str] = mapped_column(ForeignKey("vms.id"), primary_key=True)
    until: Mapped[float] = mapped_column(primary_key=True)
    since: Mapped[float]
    """0: it is the first that was known."""
    price_per_hour: Mapped[float]


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
    """One row, with id 1: the last event that was delivered to the webhook, or given up."""

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
    """A packed workdir that is stored completely."""

    __tablename__ = "archives"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    total_bytes: Mapped[int]
    created_at: Mapped[float]


class ArchiveChunkRow(Base):
    """A part of a packed workdir, if managers share the store or an earlier version wrote it."""

    __tablename__ = "archive_chunks"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class StackRow(Base):
    """Where a rank of a generation that hung was."""

    __tablename__ = "stacks"
    __table_args__ = (Index("ix_stacks_at", "at"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    vm_id: Mapped[str]
    at: Mapped[float]
    text: Mapped[str] = mapped_column(Text)
    error: Mapped[str] = mapped_column(Text)
    """Why there is no text; otherwise empty."""


class VmUsageRow(Base):
    """How busy a VM has been, in a bounded number of points."""

    __tablename__ = "vm_usage"

    vm_id: Mapped[str] = mapped_column(ForeignKey("vms.id"), primary_key=True)
    points: Mapped[bytes] = mapped_column(LargeBinary)
    """Packed by `domain.vm_usage`."""


class MetricRow(Base):
    """One step. A later generation that repeats a step overwrites it, an older one never does."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    loss: Mapped[float | None]
    """Null if it was not a number: neither SQLite nor JSON can hold a NaN."""
    step_s: Mapped[float]
    """From the end of the step before."""
    examples: Mapped[int]
    generation: Mapped[int] = mapped_column(Integer)
    at: Mapped[float]
    between_s: Mapped[float] = mapped_column(default=0.0)
    """The part of `step_s` in which the script was between two steps. 0 in rows of an earlier version, whose `step_s`
    leaves it out."""
    gradient_norm: Mapped[float | None]
    """Before it was clipped. Null: not known, or not a number."""
    learning_rate: Mapped[float | None]


class MetricBlockRow(Base):
    """Many steps summed up, for charts: see `varuna_manager.history.step_metrics`."""

    __tablename__ = "metric_blocks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_step: Mapped[int]
    last_step: Mapped[int]
    steps: Mapped[int]
    at: Mapped[float]
    """Of the newest step."""
    generation: Mapped[int] = mapped_column(Integer)
    """The newest step."""
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
    gradient_norms: Mapped[int] = mapped_column(default=0)
    """Steps whose norm is known."""
    gradient_norm_sum: Mapped[float | None]
    gradient_norm_min: Mapped[float | None]
    gradient_norm_max: Mapped[float | None]
    learning_rates: Mapped[int] = mapped_column(default=0)
    learning_rate_sum: Mapped[float | None]
    learning_rate_min: Mapped[float | None]
    learning_rate_max: Mapped[float | None]


class LoggedValueRow(Base):
    """A value that the script has logged under a name: see `varuna_manager.jobs.logged_values`."""

    __tablename__ = "logged_values"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float]
    generation: Mapped[int] = mapped_column(Integer)
    rank: Mapped[int] = mapped_column(Integer)
    """That logged it."""
    at: Mapped[float]


class TraceRow(Base):
    """A stage's newest traced mini-batch of a generation."""

    __tablename__ = "traces"
    __table_args__ = (Index("ix_traces_at", "at"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    step: Mapped[int]
    at: Mapped[float]
    begin_us: Mapped[float]
    """Start of its first op by its machine's clock, in µs since the epoch."""
    spans: Mapped[dict[str, Any]]


class FleetRow(Base):
    """How many VMs are wanted from a provider."""

    __tablename__ = "fleet"

    provider: Mapped[str] = mapped_column(primary_key=True)
    target: Mapped[int] = mapped_column(Integer)
    min_vms: Mapped[int | None] = mapped_column(Integer)
    max_vms: Mapped[int | None] = mapped_column(Integer)
    """With both, the target follows the jobs' wants between them; null: it is fixed."""
    request: Mapped[str | None]
    """Tag of the request that may be under way: written before the provider is called."""
    request_count: Mapped[int | None] = mapped_column(Integer)


class PoolRow(Base):
    """The request of one pool that may be under way: written before its provider is called."""

    __tablename__ = "pools"

    name: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[str | None]
    """Its tag. Null: none is under way."""
    request_count: Mapped[int | None] = mapped_column(Integer)


class FleetDayRow(Base):
    """Totals per day (UTC) of VMs whose rows were deleted, so that the fleet's past cost stays known."""

    __tablename__ = "fleet_days"

    day: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """Days since the epoch."""
    vm_hours: Mapped[float]
    gpu_hours: Mapped[float]
    cost: Mapped[float]
    """Of VMs with a price."""
    gone: Mapped[int]
    """VMs that went away on this day."""
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
    """The agent of a VM that has joined. Joining again replaces it, and with it all earlier certificates."""

    __tablename__ = "enrolments"

    vm_id: Mapped[str] = mapped_column(primary_key=True)
    enrolment: Mapped[str]
    token_id: Mapped[str]
    key_sha256: Mapped[str]
    """Of the public key that it joined with."""
    joined_at: Mapped[float]
    revoked_at: Mapped[float | None]


class AuditRow(Base):
    """A call that changes something: who, what, from where, and the answer (null: not known)."""

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
    """Grows with every change of the leader."""
    expires_at: Mapped[float]
    """By the database's clock."""
    http_url: Mapped[str]
    grpc_address: Mapped[str]
