"""The documents of the manager's REST API (`/api/v1`), by which the manager answers and the client reads.

They are plain dicts with known keys. Times are ISO 8601 in UTC; columns of times for charts are seconds since the epoch
(`..._unix_s`). A document of an older manager may lack keys, and one of a newer manager may have more.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

JobSpecDocument = dict[str, Any]
"""A job as the user wrote it: name, workdir, run, global_batch, resources, checkpoint, env, plan, ..."""

Timestamp = str
"""ISO 8601, UTC."""

TimeCause = Literal[
    "training",
    "bubbles",
    "data",
    "evaluation",
    "checkpoints",
    "script",
    "redone_steps",
    "morphs",
    "waiting_for_vms",
    "calibration",
]
"""What a job spends its time on."""

END_STATES = frozenset({"succeeded", "failed", "cancelled"})
"""The states in which a job is over."""

document = with_config(ConfigDict(defer_build=True))
"""For a class of documents: its schema is made when it is first needed. All of them at once would keep a manager from
leading for a while."""


@document
class ProblemDocument(TypedDict):
    """An error (RFC 9457), as `application/problem+json`."""

    type: str
    """`urn:varuna:problem:` and a word that never changes for this kind of error."""
    title: str
    status: int
    detail: str
    """What is wrong and what to do about it, in one line."""


@document
class StateChangeDocument(TypedDict):
    """One change of the state of a job, a generation, a VM or a worker."""

    at: Timestamp
    state: str
    reason: str


@document
class PlanDocument(TypedDict):
    """The shape of a generation: p pipeline stages × d replicas, with micro-batches of `micro_batch` examples."""

    p: int
    d: int
    micro_batch: int
    global_batch: int
    stage_starts: list[int]
    """The first section of each stage."""
    policy: str
    run_ahead: int
    """Forwards that a stage may run beyond those that its place in the pipeline requires."""
    recompute: list[bool]
    """For each stage, whether it recomputes activations."""
    predicted_minibatch_s: float
    examples_per_s: float
    memory_bytes: list[int]
    """Predicted memory of each stage."""
    shares: list[int]
    """The micro-batches of each replica; empty: as equal as can be."""
    gpu_types: list[str]
    """For each rank (replica * p + stage), the type of GPU that it is planned for; empty: all GPUs are equal."""
    link_connections: int
    """TCP connections of each link between two VMs."""


@document
class JobDocument(TypedDict):
    """One job. `step` counts completed steps; `loss` is the loss of the last one, null if it is not finite."""

    id: str
    name: str
    state: str
    """queued, running, cancelling, succeeded, failed or cancelled."""
    reason: str | None
    """The reason of the last decision about the job."""
    spec: JobSpecDocument
    error: str | None
    exit_code: int | None
    """Exit code of the script, if it is known when the job is over; negative: the signal that ended the script."""
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    step: int
    loss: float | None
    not_finite_from: int | None
    """The first of its newest steps in a row without a finite loss or gradient; null: the newest step's are finite."""
    steps_skipped: int
    """Steps that updated nothing, because their loss or gradient was not finite; one that is redone counts twice."""
    generation: int | None
    plan: PlanDocument | None
    """The plan of the newest training generation."""
    version: int
    """Changes with the state, the spec and the last decision's reason; for `If-Match`."""
    gpus: int
    """GPUs that the job has now."""
    step_s: float | None
    """Step time: the mean time from the end of one step to the end of the next, over the newest `rate_steps` steps."""
    between_s: float | None
    """The part of `step_s` in which the script was between two steps."""
    examples_per_s: float | None
    """Examples of these steps, divided by their time."""
    rate_steps: int
    """The number of steps that `step_s` and `examples_per_s` come from: at most 100, of the newest generation, without
    its first one unless it has no others."""
    last_step_at: Timestamp | None


@document
class DeletedJobDocument(TypedDict):
    """A job that was deleted."""

    id: str
    name: str
    deleted: bool


@document
class RankPlacementDocument(TypedDict):
    """Where a rank runs: on device `local_rank` of a VM."""

    rank: int
    vm_id: str
    local_rank: int


@document
class WorkerDocument(TypedDict):
    """One rank of a generation. `cause`, `exit_code` and `error` explain how it stopped."""

    job_id: str
    job_name: str
    generation: int
    rank: int
    vm_id: str
    local_rank: int
    state: str
    """assigned, running, exited or lost."""
    pid: int | None
    cause: str | None
    exit_code: int | None
    error: str | None
    step: int | None
    """The last completed step in its heartbeats; this field and the following are null when it sends none."""
    forward_us: int | None
    """Per whole micro-batch of the last step, without waiting; 0: it ran none, but a smaller one at most."""
    backward_us: int | None
    wait_us: int | None
    """Time of the last step in which it had nothing to compute."""
    memory_bytes: int | None


@document
class CandidateDocument(TypedDict):
    """A shape that the planner considered."""

    p: int
    d: int
    micro_batch: int
    predicted_minibatch_s: float | None
    """A lower bound if `reason` has "at least"; null if the shape does not fit."""
    fits: bool
    """Whether it fits in memory."""
    reason: str
    """Why it won or lost."""


@document
class PhaseDocument(TypedDict):
    """A phase of a generation's life."""

    name: str
    """launching (until every rank has started), calibrating, first_step, training or stopping."""
    start: Timestamp
    end: Timestamp | None
    """Null while the phase lasts."""
    seconds: float


@document
class DowntimePartDocument(TypedDict):
    """One part of the time without progress before a generation's first step."""

    name: str
    seconds: float
    rank: int | None
    """The rank that all others waited for, if there was one."""


@document
class StateSourcesDocument(TypedDict):
    """Where the workers of a generation have their state from, in bytes."""

    kept: int
    """Kept in memory by processes of the generation before, which go on in place."""
    peers: int
    """Sent by processes of an earlier generation, from memory to memory."""
    store: int
    """Read from a checkpoint."""


@document
class GenerationDocument(TypedDict):
    """One incarnation of a job: a plan on named VMs. `kind` is calibration or training."""

    number: int
    kind: str
    state: str
    """launching, running, stopping or ended."""
    p: int
    d: int
    micro_batch: int
    plan: PlanDocument
    candidates: list[CandidateDocument]
    placement: list[RankPlacementDocument]
    workers: list[WorkerDocument]
    keepers: list[int]
    """By stage: the rank that keeps a copy of the state of its rank in the first replica; empty: no copies are kept."""
    copies_reason: str | None
    """Which copies it keeps, of states and of the sums of long steps (marks), and why; null: the job file decides, or
    there was no choice."""
    copies_obstacle: str | None
    """Why its workers keep no copies of states, though it has `keepers`, and save as often as without; null: nothing is
    known against it."""
    marks_obstacle: str | None
    """Why they keep no marks, which they were to keep; null: nothing is known against it."""
    copied_step: int | None
    """The newest step that the keepers have copies of, for every stage; null: none is known."""
    reason: str
    kind_of_morph: str | None
    """reshape: its workers are processes of the generation before, which kept their state; restart: they are new
    processes, which loaded what earlier ones held in memory, or a checkpoint; null: it calibrates, or is the first that
    trains."""
    state_from: StateSourcesDocument | None
    """Of the workers that have their state; null where `kind_of_morph` is."""
    created_at: Timestamp
    started_at: Timestamp | None
    """When its first step was completed."""
    stop_requested_at: Timestamp | None
    stop_cause: str | None
    ended_at: Timestamp | None
    end_cause: str | None
    end_reason: str | None
    resumed_step: int | None
    last_step: int | None
    last_step_at: Timestamp | None
    last_loss: float | None
    seconds_without_progress: float | None
    """From the last step of any earlier generation to the first step of this one."""
    steps_redone: int | None
    micro_batches_redone: int | None
    """How many micro-batches of the step that was under way in the generation before a reshape runs again; all those of
    a lost replica count. Null: unknown, as after a restart."""
    downtime: list[DowntimePartDocument] | None
    """The parts of `seconds_without_progress`; null before the first step."""
    phases: list[PhaseDocument]
    history: list[StateChangeDocument]


@document
class PlanRecordDocument(TypedDict):
    """A plan, the other candidates, and how well its prediction held."""

    generation: int
    at: Timestamp
    reason: str
    plan: PlanDocument
    candidates: list[CandidateDocument]
    """Best first, at most 64; empty in lists of plans."""
    predicted_step_s: float
    actual_step_s: float | None
    """Step time, as in JobDocument; null before the first step."""
    between_s: float | None
    """The part of `actual_step_s` in which the script was between two steps; no plan predicts it."""
    actual_examples_per_s: float | None
    steps: int
    """How many steps `actual_step_s` is the mean of."""
    error: float | None
    """(actual - between - predicted) / predicted."""


@document
class StepMetricsDocument(TypedDict):
    """One step of a job: the mean loss over the global batch, the duration, and the generation that computed it."""

    step: int
    loss: float | None
    """Null if it was not a finite number."""
    step_s: float
    """From the end of the step before; the first step of a process counts from its own beginning."""
    between_s: float
    """The part of `step_s` in which the script was between two steps."""
    examples: int
    gradient_norm: float | None
    """Of all parameters, before clipping. Null: not known, or not a finite number."""
    learning_rate: float | None
    """Of the first group of parameters; null: not known."""
    generation: int
    at: Timestamp


@document
class SpreadDocument(TypedDict):
    """Three columns: the least, the mean and the greatest value of each bucket; null where a bucket has none."""

    min: list[float | None]
    mean: list[float | None]
    max: list[float | None]


@document
class MetricBucketsDocument(TypedDict):
    """Steps in buckets of equal width, as columns. Empty buckets are left out."""

    from_step: int
    to_step: int
    steps: int
    """Number of steps from `from_step` to `to_step`, both included."""
    bucket_steps: int
    first_step: list[int]
    last_step: list[int]
    count: list[int]
    at_unix_s: list[float]
    """Time of the newest step in the bucket."""
    generation: list[int]
    """The newest generation in the bucket."""
    loss: SpreadDocument
    step_s: SpreadDocument
    examples_per_s: SpreadDocument
    gradient_norm: SpreadDocument
    learning_rate: SpreadDocument


@document
class LoggedSeriesDocument(TypedDict):
    """What a job's script has logged under a name by `varuna.log`, as columns, by step."""

    name: str
    step: list[int]
    value: list[float]
    generation: list[int]
    at_unix_s: list[float]
    """When the manager stored the value."""


@document
class CheckpointDocument(TypedDict):
    """A committed checkpoint. It may have been pruned since."""

    step: int
    generation: int
    url: str
    total_bytes: int
    at: Timestamp


@document
class TimeShareDocument(TypedDict):
    """The part of a job's time that one cause took."""

    cause: TimeCause
    seconds: float
    share: float
    """Fraction of the job's whole time."""
    text: str


@document
class GenerationTimeDocument(TypedDict):
    """Where the time of one generation went, and how long the job waited for VMs before it."""

    generation: int
    kind: str
    waiting_s: float
    morph_s: float
    training_s: float
    bubbles_s: float
    redone_s: float
    between_s: float
    """Between steps: data, evaluation, checkpoints, and all else that the script did."""


@document
class JobTimeDocument(TypedDict):
    """Where a job's time went since its submission, without the time from an end to a retry. The causes add up to
    `total_s`."""

    start: Timestamp
    end: Timestamp
    """The end of the job; now, if it is not over."""
    total_s: float
    elapsed_s: float
    """Since the job's first start: `total_s` without the time before it."""
    useful_s: float
    """Inside steps that counted: training and bubbles."""
    goodput: float
    """useful_s / elapsed_s; `varuna_job_goodput_ratio` in /metrics is the same figure."""
    causes: list[TimeShareDocument]
    generations: list[GenerationTimeDocument]


@document
class VmCostDocument(TypedDict):
    """What one VM cost a job."""

    vm_id: str
    hours: float
    gpu_hours: float
    price_per_hour: float | None
    """Its present or last price."""
    cost: float | None
    """By the prices that it had at the time."""


@document
class JobCostDocument(TypedDict):
    """VM-hours of a job and their cost, in the provider's currency, where the provider has prices. Jobs that share a VM
    pay in proportion to their GPUs."""

    vm_hours: float
    gpu_hours: float
    cost: float | None
    """Null if none of its VMs has a price."""
    cost_per_hour: float | None
    """What its VMs cost now."""
    vms_without_price: int
    by_vm: list[VmCostDocument]
    """The most expensive first, at most 1,000."""


@document
class StageTraceDocument(TypedDict):
    """What one rank did in a traced mini-batch."""

    stage: int
    rank: int
    vm_id: str | None
    ops: list[tuple[str, int, float, float]]
    """(F, R or B; micro-batch; start µs; duration µs)."""
    all_reduce: list[tuple[str, float, float]]
    """(name, start µs, duration µs)."""


@document
class PipelineDocument(TypedDict):
    """The stages of replica 0 in the newest traced mini-batch."""

    generation: int
    step: int
    p: int
    d: int
    at: Timestamp
    span_us: float
    """From the start of the first op, which is 0 µs, to the end of the last one."""
    stages: list[StageTraceDocument]


@document
class EventDocument(TypedDict):
    """Something that happened or was decided; `message` has the reason."""

    id: int
    at: Timestamp
    job_id: str | None
    job_name: str | None
    """Null: it is about no job, or about one whose rows are deleted."""
    generation: int | None
    vm_id: str | None
    kind: str
    message: str
    data: dict[str, Any]


@document
class TextProblemDocument(TypedDict):
    """A mistake in a job's text."""

    line: int
    """From 1."""
    field: str
    """The keys to it, joined by dots; empty: the whole text."""
    text: str


@document
class DryRunDocument(TypedDict):
    """What a job would be if it were submitted now."""

    problems: list[TextProblemDocument]
    """By line. While there are any, all else is empty."""
    document: dict[str, Any] | None
    """What POST /jobs takes."""
    free_gpus: int
    """GPUs that the job could get now."""
    all_gpus: int
    """All GPUs of ready VMs that fit the job."""
    plan: PlanDocument | None
    """For the free GPUs, by the profile of an earlier job of the same name, command and environment."""
    reason: str | None
    """Why it is this plan, or none."""
    cost_per_hour: float | None
    """Null: no plan, or the provider has no prices."""


@document
class ProgressDocument(TypedDict):
    """How far a job is: sent to the readers of the event stream, and not stored."""

    job_id: str
    generation: int
    step: int
    loss: float | None
    step_s: float
    """Step time, as in JobDocument."""
    between_s: float
    examples_per_s: float | None
    rate_steps: int
    at: Timestamp


@document
class StackDocument(TypedDict):
    """The stack of a rank in a generation that hung: `text`, or in `error` why there is none."""

    generation: int
    rank: int
    vm_id: str
    at: Timestamp
    text: str
    error: str


@document
class LogMatchDocument(TypedDict):
    """A line of a log."""

    offset: int
    """Position of the line's first byte in the log."""
    line_number: int
    """From 1."""
    text: str
    """At most the first 1,000 characters."""


@document
class LogMatchesDocument(TypedDict):
    """The lines of a worker's log that contain a text."""

    generation: int
    rank: int
    searched_bytes: int
    complete: bool
    """False if the log goes on, or if there are more matches."""
    matches: list[LogMatchDocument]


@document
class ArchiveDocument(TypedDict):
    """A packed workdir that the manager has."""

    sha256: str
    total_bytes: int
