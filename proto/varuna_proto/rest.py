"""The documents of the manager's REST API: what `/api/v1` answers, for the manager that checks its answers against them
and for the client that reads them.

They are plain dicts with known keys. Times are ISO 8601 in UTC; of columns of numbers for charts, seconds since the
epoch, and their names say so. A key may be missing when the manager is older than the client, and there may be more
when it is newer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

JobSpec = dict[str, Any]
"""A job as the user wrote it: name, workdir, run, global_batch, resources, checkpoint, env, plan, ..."""

Timestamp = str
"""ISO 8601, UTC."""

END_STATES = frozenset({"succeeded", "failed", "cancelled"})
"""Of jobs."""

_documented = with_config(ConfigDict(use_attribute_docstrings=True))


@_documented
class Problem(TypedDict):
    """An error (RFC 9457), as `application/problem+json`."""

    type: str
    """`urn:varuna:problem:` and a word that stays the same for this kind of error."""
    title: str
    status: int
    detail: str
    """What is wrong and what helps, in one line for a person."""


@_documented
class Entry(TypedDict):
    """One change of an object's state."""

    at: Timestamp
    state: str
    reason: str


@_documented
class Plan(TypedDict):
    """The shape of a generation: p pipeline stages × d replicas, micro-batches of `micro_batch` examples."""

    p: int
    d: int
    micro_batch: int
    global_batch: int
    stage_starts: list[int]
    """First section of each stage."""
    policy: str
    run_ahead: int
    """Forwards beyond those that the stage's place in the pipeline asks for."""
    recompute: list[bool]
    """By stage."""
    predicted_minibatch_s: float
    examples_per_s: float
    memory_bytes: list[int]
    """Predicted, by stage."""


@_documented
class Job(TypedDict):
    """One job; `step` counts completed steps, `loss` is that of the last one."""

    id: str
    name: str
    state: str
    """queued, running, cancelling, succeeded, failed or cancelled."""
    reason: str | None
    """Of the last decision about it."""
    spec: JobSpec
    error: str | None
    exit_code: int | None
    """Of the script, when the job is over and it is known; negative: the signal that ended it."""
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    step: int
    loss: float | None
    generation: int | None
    plan: Plan | None
    """Of the newest training generation."""
    version: int
    """Changes with its state, its spec and the last decision's reason; `If-Match` takes it."""
    gpus: int
    """That it has now."""
    step_s: float | None
    """Of its newest step."""
    examples_per_s: float | None
    last_step_at: Timestamp | None


@_documented
class Deleted(TypedDict):
    """A job that nobody sees any more."""

    id: str
    name: str
    deleted: bool


@_documented
class Place(TypedDict):
    """Where a rank is: the device `local_rank` of a VM."""

    rank: int
    vm_id: str
    local_rank: int


@_documented
class Worker(TypedDict):
    """One rank of a generation; `cause`, `exit_code` and `error` tell how it stopped."""

    job_id: str
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
    """Last completed step that was heard of; like what follows, null where nothing is heard of it now."""
    forward_us: int | None
    """Per micro-batch of the last step, waiting not counted."""
    backward_us: int | None
    wait_us: int | None
    """Of the last step: time without anything to compute."""
    memory_bytes: int | None


@_documented
class Candidate(TypedDict):
    """A shape that the planner considered."""

    p: int
    d: int
    micro_batch: int
    predicted_minibatch_s: float | None
    """A lower bound where `reason` says "at least"; null where it does not fit."""
    fits: bool
    """In memory."""
    reason: str
    """Why it won or lost."""


@_documented
class Phase(TypedDict):
    """A part of a generation's life."""

    name: str
    """launching (until every rank has started), calibrating, first_step, training or stopping."""
    start: Timestamp
    end: Timestamp | None
    """Null while it lasts."""
    seconds: float


@_documented
class Downtime(TypedDict):
    """A part of the time without progress before a generation's first step."""

    name: str
    seconds: float
    rank: int | None
    """Whose it was, where all others waited for that rank."""


@_documented
class Generation(TypedDict):
    """One incarnation of a job: a plan on named VMs. `kind` is calibration or training."""

    number: int
    kind: str
    state: str
    """launching, running, stopping or ended."""
    p: int
    d: int
    micro_batch: int
    plan: Plan
    candidates: list[Candidate]
    placement: list[Place]
    workers: list[Worker]
    reason: str
    created_at: Timestamp
    started_at: Timestamp | None
    """When its first step was done."""
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
    """From the last step of any generation before to its first one."""
    steps_redone: int | None
    downtime: list[Downtime] | None
    """What the seconds without progress went to; null before the first step."""
    phases: list[Phase]
    history: list[Entry]


@_documented
class PlanRecord(TypedDict):
    """A plan, what else was considered, and what it turned out to be worth."""

    generation: int
    at: Timestamp
    reason: str
    plan: Plan
    candidates: list[Candidate]
    """Best first, at most 64; empty in lists."""
    predicted_step_s: float
    actual_step_s: float | None
    """Median of the generation's last 1,000 steps; null before the first."""
    actual_examples_per_s: float | None
    steps: int
    """That `actual_step_s` is of."""
    error: float | None
    """(actual - predicted) / predicted."""


@_documented
class Metric(TypedDict):
    """One step of a job: mean loss over the global batch, seconds, and the generation that made it."""

    step: int
    loss: float | None
    """Null where it was not a number."""
    step_s: float
    examples: int
    generation: int
    at: Timestamp


@_documented
class Spread(TypedDict):
    """A column each of the least, the mean and the greatest value in every bucket; null where there is none."""

    min: list[float | None]
    mean: list[float | None]
    max: list[float | None]


@_documented
class MetricBuckets(TypedDict):
    """Steps, so many together in each bucket, as columns. Buckets without a step are left out."""

    from_step: int
    to_step: int
    steps: int
    """Between the two, both included."""
    bucket_steps: int
    first_step: list[int]
    last_step: list[int]
    count: list[int]
    at_unix_s: list[float]
    """Of the newest step in the bucket."""
    generation: list[int]
    """The newest in the bucket."""
    loss: Spread
    step_s: Spread
    examples_per_s: Spread


@_documented
class Checkpoint(TypedDict):
    """A checkpoint that was committed (it may have been pruned since)."""

    step: int
    generation: int
    url: str
    total_bytes: int
    at: Timestamp


@_documented
class LostTime(TypedDict):
    """Time of a job by what it was spent on."""

    cause: Literal["training", "bubbles", "redone_steps", "morphs", "waiting_for_vms", "calibration"]
    seconds: float
    share: float
    """Of the whole."""
    text: str


@_documented
class GenerationTime(TypedDict):
    """Where the time of one generation went, and the time without any before it."""

    generation: int
    kind: str
    waiting_s: float
    morph_s: float
    training_s: float
    bubbles_s: float
    redone_s: float


@_documented
class JobTime(TypedDict):
    """Where a job's time went, from its submission on. The causes add up to `total_s`."""

    start: Timestamp
    end: Timestamp
    """Now, for one that is not over."""
    total_s: float
    useful_s: float
    goodput: float
    """useful_s / total_s."""
    causes: list[LostTime]
    generations: list[GenerationTime]


@_documented
class VmCost(TypedDict):
    """What a job had of one VM."""

    vm_id: str
    hours: float
    gpu_hours: float
    price_per_hour: float | None
    cost: float | None


@_documented
class JobCost(TypedDict):
    """VM-hours of a job, and their price where the provider tells it, in its currency. Of a VM that jobs share, each
    pays by its GPUs."""

    vm_hours: float
    gpu_hours: float
    cost: float | None
    """Null: no VM of it has a price."""
    cost_per_hour: float | None
    """Now."""
    vms_without_price: int
    by_vm: list[VmCost]
    """The dearest first, at most 1,000."""


@_documented
class StageTrace(TypedDict):
    """What one rank did in a traced mini-batch."""

    stage: int
    rank: int
    vm_id: str | None
    ops: list[tuple[str, int, float, float]]
    """(F, R or B; micro-batch; start µs; duration µs)."""
    all_reduce: list[tuple[str, float, float]]
    """(name, start µs, duration µs)."""


@_documented
class Pipeline(TypedDict):
    """The pipeline of the newest traced mini-batch: the stages of replica 0."""

    generation: int
    step: int
    p: int
    d: int
    at: Timestamp
    span_us: float
    """From the first op's start, which is 0 µs, to the end of the last."""
    stages: list[StageTrace]


@_documented
class Event(TypedDict):
    """Something that happened or was decided, with its reason in `message`."""

    id: int
    at: Timestamp
    job_id: str | None
    generation: int | None
    vm_id: str | None
    kind: str
    message: str
    data: dict[str, Any]


@_documented
class Progress(TypedDict):
    """How far a job is: told to whoever follows the stream of events, and not stored."""

    job_id: str
    generation: int
    step: int
    loss: float | None
    step_s: float
    examples_per_s: float | None
    at: Timestamp


@_documented
class Stack(TypedDict):
    """Where a rank of a generation that hung stood: `text`, or `error`: why that is not known."""

    generation: int
    rank: int
    vm_id: str
    at: Timestamp
    text: str
    error: str


@_documented
class LogMatch(TypedDict):
    """A line of a log."""

    offset: int
    """Of the line's first byte."""
    line_number: int
    """From 1."""
    text: str
    """Cut at 1,000 characters."""


@_documented
class LogMatches(TypedDict):
    """Lines of a worker's log in which a text occurs."""

    generation: int
    rank: int
    searched_bytes: int
    complete: bool
    """False: there is more log, or there are more matches."""
    matches: list[LogMatch]
