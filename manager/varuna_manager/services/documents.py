"""Rows as the JSON documents of the REST API. Times are ISO 8601, UTC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from varuna_manager.db.models import (
    CheckpointRow,
    EventRow,
    GenerationRow,
    JobRow,
    MetricRow,
    StackRow,
    VmRow,
    WorkerRow,
)
from varuna_manager.domain.states import GenerationKind

Document = dict[str, Any]


def iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def job_document(job: JobRow, generations: Sequence[GenerationRow]) -> Document:
    """`generations`: all of the job's, oldest first."""
    stepped = [generation for generation in generations if generation.last_step is not None]
    training = [generation for generation in generations if generation.kind == GenerationKind.TRAINING]
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "spec": job.spec,
        "error": job.error,
        "exit_code": job.exit_code,
        "created_at": iso(job.created_at),
        "started_at": iso(job.started_at),
        "finished_at": iso(job.finished_at),
        "step": max((generation.last_step or 0 for generation in stepped), default=0),
        "loss": stepped[-1].last_loss if stepped else None,
        "generation": generations[-1].number if generations else None,
        "plan": training[-1].plan if training else None,
    }


def generation_document(generation: GenerationRow, workers: Sequence[WorkerRow]) -> Document:
    """`workers`: the generation's, by rank."""
    plan = generation.plan
    return {
        "number": generation.number,
        "kind": generation.kind,
        "state": generation.state,
        "p": plan["p"],
        "d": plan["d"],
        "micro_batch": plan["micro_batch"],
        "plan": plan,
        "candidates": generation.candidates,
        "placement": [{"rank": w.rank, "vm_id": w.vm_id, "local_rank": w.local_rank} for w in workers],
        "workers": [worker_document(worker) for worker in workers],
        "reason": generation.reason,
        "created_at": iso(generation.created_at),
        "started_at": iso(generation.started_at),
        "ended_at": iso(generation.ended_at),
        "end_cause": generation.end_cause,
        "end_reason": generation.end_reason,
        "resumed_step": generation.resumed_step,
        "last_step": generation.last_step,
        "seconds_without_progress": generation.seconds_without_progress,
        "steps_redone": generation.steps_redone,
    }


def worker_document(worker: WorkerRow) -> Document:
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
    }


def vm_document(vm: VmRow, workers: Sequence[WorkerRow], last_heard_s: float | None) -> Document:
    """`workers`: those on the VM that have not stopped."""
    return {
        "id": vm.id,
        "provider": vm.provider,
        "state": vm.state,
        "gpus": vm.gpus,
        "device_memory_bytes": vm.device_memory_bytes,
        "host": vm.host,
        "ref": vm.ref,
        "generation": max((worker.generation for worker in workers), default=None),
        "workers": [worker_document(worker) for worker in workers],
        "last_heard_s": last_heard_s,
        "created_at": iso(vm.created_at),
        "reason": vm.reason,
        "slow_ratio": vm.slow_ratio,
        "slow_reason": vm.slow_reason,
        "quarantined_until": iso(vm.quarantined_until),
        "drain_deadline": iso(vm.drain_deadline),
        "hangs": vm.hangs,
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


def metric_document(metric: MetricRow) -> Document:
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
