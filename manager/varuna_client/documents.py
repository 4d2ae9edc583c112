"""The documents of the manager's REST API, as the client reads them: plain dicts with known keys.

They mirror what `/api/v1` answers. A key may be missing when the manager is older than the client, so readers of
optional parts use `.get`.
"""

from __future__ import annotations

from typing import Any, TypedDict

JobSpec = dict[str, Any]
"""A job as the user wrote it: name, workdir, run, global_batch, resources, checkpoint, env, plan."""

Timestamp = str
"""ISO 8601, UTC."""

END_STATES = frozenset({"succeeded", "failed", "cancelled"})


class Job(TypedDict):
    """One job; `step` counts completed steps, `loss` is that of the last one."""

    id: str
    name: str
    state: str
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
    plan: dict[str, Any] | None


class Worker(TypedDict):
    """One rank of a generation; `cause`, `exit_code` and `error` tell how it stopped."""

    job_id: str
    generation: int
    rank: int
    vm_id: str
    local_rank: int
    state: str
    pid: int | None
    cause: str | None
    exit_code: int | None
    error: str | None


class Generation(TypedDict):
    """One incarnation of a job. Times in seconds; `kind` is calibration or training."""

    number: int
    kind: str
    state: str
    p: int
    d: int
    micro_batch: int
    plan: dict[str, Any] | None
    candidates: list[dict[str, Any]]
    placement: list[dict[str, Any]]
    workers: list[Worker]
    reason: str
    created_at: Timestamp
    started_at: Timestamp | None
    ended_at: Timestamp | None
    end_reason: str | None
    resumed_step: int | None
    last_step: int | None
    seconds_without_progress: float | None
    steps_redone: int | None


class Metric(TypedDict):
    """One step of a job: mean loss over the global batch, seconds, and the generation that made it."""

    step: int
    loss: float | None
    """None when it was not a number."""
    step_s: float
    generation: int
    at: Timestamp


class Vm(TypedDict):
    """One VM. `ref` is the provider's handle; the local provider's holds the agent's `pid`."""

    id: str
    provider: str
    state: str
    gpus: int
    device_memory_bytes: int
    host: str
    ref: dict[str, Any]
    last_heard_s: float | None
    created_at: Timestamp
    reason: str | None
    slow_ratio: float | None
    """How many times as long as its peers it takes, while it is found slow."""
    slow_reason: str | None
    quarantined_until: Timestamp | None


class Stack(TypedDict):
    """Where a rank of a generation that hung stood: `text`, or `error`: why that is not known."""

    generation: int
    rank: int
    vm_id: str
    at: Timestamp
    text: str
    error: str


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
