"""REST documents of jobs, their workers and their stacks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from varuna_manager.answers.documents import format_time
from varuna_manager.db.models import JobRow, StackRow
from varuna_manager.jobs.step_rates import StepRate
from varuna_manager.world.vm_registry import Health
from varuna_proto.plan import Plan
from varuna_proto.rest import JobDocument, JobSpecDocument, PlanDocument, StackDocument, WorkerDocument

HIDDEN = "(hidden)"
"""What a viewer reads in place of a value."""
_PLAN_DEFAULTS = Plan(p=1, d=1, micro_batch=1, global_batch=0).to_document()
"""Fields that a stored plan of an earlier version may lack."""


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """How far a job is, from its generations."""

    step: int = 0
    loss: float | None = None
    last_step_at: float | None = None
    generation: int | None = None
    plan: PlanDocument | None = None
    """Of the newest training generation."""
    gpus: int = 0
    rate: StepRate | None = None
    not_finite_from: int | None = None
    steps_skipped: int = 0


def make_job_document(job: JobRow, progress: JobProgress) -> JobDocument:
    rate = progress.rate
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "spec": _make_encodable(job.spec),
        "error": job.error,
        "exit_code": job.exit_code,
        "created_at": format_time(job.created_at),
        "started_at": format_time(job.started_at),
        "finished_at": format_time(job.finished_at),
        "step": progress.step,
        "loss": progress.loss,
        "not_finite_from": progress.not_finite_from,
        "steps_skipped": progress.steps_skipped,
        "generation": progress.generation,
        "plan": progress.plan,
        "version": job.version,
        "gpus": progress.gpus,
        "step_s": None if rate is None else rate.step_s,
        "between_s": None if rate is None else rate.between_s,
        "examples_per_s": None if rate is None else rate.examples_per_s,
        "rate_steps": 0 if rate is None else rate.steps,
        "last_step_at": format_time(progress.last_step_at),
    }


def hide_env_values(job: JobDocument) -> JobDocument:
    """The document for a viewer: the names of the job's environment variables without their values."""
    spec = job["spec"]
    return {**job, "spec": {**spec, "env": dict.fromkeys(spec.get("env", {}), HIDDEN)}}


def _make_encodable(spec: object) -> JobSpecDocument:
    """The stored spec in characters that JSON in UTF-8 can hold: an earlier version accepted others."""
    if not isinstance(spec, dict):
        return {}
    try:
        json.dumps(spec, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return {_escape(key): _escape(value) for key, value in spec.items()}
    return spec


def _escape(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_escape(key): _escape(each) for key, each in value.items()}
        case list():
            return [_escape(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def make_plan_document(stored: Mapping[str, Any]) -> PlanDocument:
    """`stored`: of a generation. One of an earlier version lacks fields that came later."""
    return cast(PlanDocument, {**_PLAN_DEFAULTS, **stored})


def make_worker_document(worker: Any, job_name: str, health: Health | None = None) -> WorkerDocument:
    """`worker`: with the columns of WorkerRow; `job_name`: of its job; `health`: from its last heartbeat, if it still
    runs."""
    return {
        "job_id": worker.job_id,
        "job_name": job_name,
        "generation": worker.generation,
        "rank": worker.rank,
        "vm_id": worker.vm_id,
        "local_rank": worker.local_rank,
        "state": worker.state,
        "pid": worker.pid,
        "cause": worker.cause,
        "exit_code": worker.exit_code,
        "error": worker.error_text,
        "step": None if health is None else health.step,
        "forward_us": None if health is None else health.forward_us,
        "backward_us": None if health is None else health.backward_us,
        "wait_us": None if health is None else health.wait_us,
        "memory_bytes": None if health is None else health.memory_bytes,
    }


def make_stack_document(stack: StackRow) -> StackDocument:
    return {
        "generation": stack.generation,
        "rank": stack.rank,
        "vm_id": stack.vm_id,
        "at": format_time(stack.at),
        "text": stack.text,
        "error": stack.error,
    }
