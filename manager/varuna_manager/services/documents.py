"""Rows as the JSON documents of the REST API. Times are ISO 8601, UTC."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from varuna_manager.db.models import (
    CheckpointRow,
    EventRow,
    GenerationRow,
    JobRow,
    StackRow,
    VmRow,
    WorkerRow,
)
from varuna_manager.domain import accounting
from varuna_manager.services.vm_registry import Health

Document = dict[str, Any]
HIDDEN = "(hidden)"
"""What a viewer reads in place of a value."""


def iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """How far a job is, from its generations."""

    step: int = 0
    loss: float | None = None
    last_step_at: float | None = None
    generation: int | None = None
    plan: Document | None = None
    """Of the newest training generation."""
    gpus: int = 0
    step_s: float | None = None
    examples: int | None = None
    """Of the newest step, as `step_s`."""


def job_document(job: JobRow, progress: JobProgress) -> Document:
    step_s, examples = progress.step_s, progress.examples
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "spec": _answerable(job.spec),
        "error": job.error,
        "exit_code": job.exit_code,
        "created_at": iso(job.created_at),
        "started_at": iso(job.started_at),
        "finished_at": iso(job.finished_at),
        "step": progress.step,
        "loss": progress.loss,
        "generation": progress.generation,
        "plan": progress.plan,
        "version": job.version,
        "gpus": progress.gpus,
        "step_s": step_s,
        "examples_per_s": examples / step_s if examples is not None and step_s else None,
        "last_step_at": iso(progress.last_step_at),
    }


def without_env_values(job: Document) -> Document:
    """The document of a job, for who may look and no more: the names of its environment variables, not their values."""
    spec = job["spec"]
    return {**job, "spec": {**spec, "env": dict.fromkeys(spec.get("env", {}), HIDDEN)}}


def _answerable(spec: object) -> Document:
    """The spec as it was stored, in characters that an answer can have: an earlier version has taken others."""
    if not isinstance(spec, dict):
        return {}
    try:
        json.dumps(spec, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return {_cleaned(key): _cleaned(value) for key, value in spec.items()}
    return spec


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_cleaned(key): _cleaned(each) for key, each in value.items()}
        case list():
            return [_cleaned(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def generation_document(
    generation: GenerationRow, workers: Sequence[WorkerRow], healths: Iterable[Health], *, brief: bool, now: float
) -> Document:
    """`workers`: the generation's, by rank. A `brief` one has no candidates and no workers.

    `healths`: what is heard of them now.
    """
    plan = generation.plan
    heard = {health.key: health for health in healths}
    return {
        "number": generation.number,
        "kind": generation.kind,
        "state": generation.state,
        "p": plan["p"],
        "d": plan["d"],
        "micro_batch": plan["micro_batch"],
        "plan": plan,
        "candidates": [] if brief else generation.candidates,
        "placement": [{"rank": w.rank, "vm_id": w.vm_id, "local_rank": w.local_rank} for w in workers],
        "workers": [worker_document(w, heard.get((w.job_id, w.generation, w.rank))) for w in workers],
        "reason": generation.reason,
        "created_at": iso(generation.created_at),
        "started_at": iso(generation.started_at),
        "stop_requested_at": iso(generation.stop_requested_at),
        "stop_cause": generation.stop_cause,
        "ended_at": iso(generation.ended_at),
        "end_cause": generation.end_cause,
        "end_reason": generation.end_reason,
        "resumed_step": generation.resumed_step,
        "last_step": generation.last_step,
        "last_step_at": iso(generation.last_step_at),
        "last_loss": generation.last_loss,
        "seconds_without_progress": generation.seconds_without_progress,
        "steps_redone": generation.steps_redone,
        "downtime": generation.downtime if generation.started_at is not None else None,
        "phases": [phase_document(phase, now) for phase in generation_phases(generation)],
        "history": history_document(generation.history),
    }


def generation_phases(generation: GenerationRow) -> list[accounting.Phase]:
    return accounting.phases(
        kind=generation.generation_kind,
        created_at=generation.created_at,
        running_at=next((entry["at"] for entry in generation.history if entry["state"] == "running"), None),
        first_step_at=generation.started_at,
        stop_requested_at=generation.stop_requested_at,
        ended_at=generation.ended_at,
    )


def phase_document(phase: accounting.Phase, now: float) -> Document:
    end = now if phase.end is None else phase.end
    return {
        "name": phase.name,
        "start": iso(phase.start),
        "end": iso(phase.end),
        "seconds": max(end - phase.start, 0.0),
    }


def history_document(history: Sequence[Mapping[str, Any]]) -> list[Document]:
    return [{"at": iso(entry["at"]), "state": entry["state"], "reason": entry["reason"]} for entry in history]


def worker_document(worker: WorkerRow, health: Health | None = None) -> Document:
    """`health`: what is heard of it now."""
    return {
        "job_id": worker.job_id,
        "generation": worker.generation,
        "rank": worker.rank,
        "vm_id": worker.vm_id,
        "local_rank": worker.local_rank,
        "state": worker.state,
        "pid": worker.pid,
        "cause": worker.cause,
        "exit_code": worker.exit_code,
        "error": worker.error_text,
        **(_UNHEARD if health is None else _heard(health)),
    }


def _heard(health: Health) -> Document:
    return {
        "step": health.step,
        "forward_us": health.forward_us,
        "backward_us": health.backward_us,
        "wait_us": health.wait_us,
        "memory_bytes": health.memory_bytes,
    }


_UNHEARD = dict.fromkeys(_heard(Health(job_id="", generation=0, rank=0, step=0)))


def vm_document(
    vm: VmRow, workers: Sequence[WorkerRow], last_heard_s: float | None, healths: Sequence[Health] = ()
) -> Document:
    """`workers`: those on the VM that have not stopped. `healths`: what is heard of them now."""
    by_rank = {health.key: health for health in healths} if workers else {}
    return {
        "id": vm.id,
        "provider": vm.provider,
        "state": vm.state,
        "gpus": vm.gpus,
        "device_memory_bytes": vm.device_memory_bytes,
        "gpu_type": vm.gpu_type,
        "host": vm.host,
        "ref": vm.ref,
        "generation": max((worker.generation for worker in workers), default=None),
        "workers": [worker_document(w, by_rank.get((w.job_id, w.generation, w.rank))) for w in workers],
        "last_heard_s": last_heard_s,
        "created_at": iso(vm.created_at),
        "reason": vm.reason,
        "slow_ratio": vm.slow_ratio,
        "slow_reason": vm.slow_reason,
        "quarantined_until": iso(vm.quarantined_until),
        "quarantines": vm.quarantines,
        "notice_deadline": iso(vm.notice_deadline),
        "drain_deadline": iso(vm.drain_deadline),
        "cordoned_at": iso(vm.cordoned_at),
        "hangs": vm.hangs,
        "price_per_hour": vm.price_per_hour,
    }


def event_document(event: EventRow) -> Document:
    return {
        "id": event.id,
        "at": iso(event.at),
        "job_id": event.job_id,
        "generation": event.generation,
        "vm_id": event.vm_id,
        "kind": event.kind,
        "message": event.message,
        "data": event.data,
    }


def metric_document(metric: Any) -> Document:
    """`metric`: a row with the columns of MetricRow."""
    return {
        "step": metric.step,
        "loss": metric.loss,
        "step_s": metric.step_s,
        "examples": metric.examples,
        "generation": metric.generation,
        "at": iso(metric.at),
    }


def stack_document(stack: StackRow) -> Document:
    return {
        "generation": stack.generation,
        "rank": stack.rank,
        "vm_id": stack.vm_id,
        "at": iso(stack.at),
        "text": stack.text,
        "error": stack.error,
    }


def checkpoint_document(checkpoint: CheckpointRow) -> Document:
    return {
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "url": checkpoint.url,
        "total_bytes": checkpoint.total_bytes,
        "at": iso(checkpoint.at),
    }
