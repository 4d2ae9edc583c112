"""REST documents of what happened: generations, their phases, events, steps, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from varuna_manager.answers.documents import format_time, make_state_changes
from varuna_manager.db.models import CheckpointRow, EventRow, GenerationRow, WorkerRow
from varuna_manager.domain import accounting
from varuna_manager.domain.states import GenerationKind
from varuna_manager.jobs.documents import make_plan_document, make_worker_document
from varuna_manager.world.vm_registry import Health
from varuna_proto.rest import (
    CandidateDocument,
    CheckpointDocument,
    DowntimePartDocument,
    EventDocument,
    GenerationDocument,
    PhaseDocument,
    StateSourcesDocument,
    StepMetricsDocument,
)

_NO_STATE: StateSourcesDocument = {"kept": 0, "peers": 0, "store": 0}


class MorphFacts(NamedTuple):
    """What the documents of a job's generations need beside each generation's own rows."""

    first_trained: int | None
    """Number of the job's first training generation; None: there is none."""
    state_from: Mapping[int, StateSourcesDocument]
    """By generation with workers that have started."""


def make_generation_document(
    generation: GenerationRow,
    workers: Sequence[WorkerRow],
    healths: Iterable[Health],
    *,
    job_name: str,
    morphs: MorphFacts,
    brief: bool,
    now: float,
) -> GenerationDocument:
    """`workers`: the generation's, by rank. A `brief` one has no candidates and no workers.

    `healths`: from the last heartbeats of its VMs.
    """
    is_first = generation.number == morphs.first_trained or generation.generation_kind is GenerationKind.CALIBRATION
    plan = make_plan_document(generation.plan)
    by_rank = {health.key: health for health in healths}
    downtime = cast(list[DowntimePartDocument] | None, generation.downtime)
    documents = [make_worker_document(w, job_name, by_rank.get((w.job_id, w.generation, w.rank))) for w in workers]
    return {
        "number": generation.number,
        "kind": generation.kind,
        "state": generation.state,
        "p": plan["p"],
        "d": plan["d"],
        "micro_batch": plan["micro_batch"],
        "plan": plan,
        "candidates": [] if brief else cast(list[CandidateDocument], generation.candidates),
        "placement": [{"rank": w.rank, "vm_id": w.vm_id, "local_rank": w.local_rank} for w in workers],
        "workers": documents,
        "keepers": generation.keepers or [],
        "copies_reason": generation.copies_reason,
        "copies_obstacle": generation.copies_obstacle,
        "marks_obstacle": generation.marks_obstacle,
        "reason": generation.reason,
        "kind_of_morph": None if is_first else "reshape" if generation.in_place else "restart",
        "state_from": None if is_first else morphs.state_from.get(generation.number, _NO_STATE),
        "created_at": format_time(generation.created_at),
        "started_at": format_time(generation.started_at),
        "stop_requested_at": format_time(generation.stop_requested_at),
        "stop_cause": generation.stop_cause,
        "ended_at": format_time(generation.ended_at),
        "end_cause": generation.end_cause,
        "end_reason": generation.end_reason,
        "resumed_step": generation.resumed_step,
        "last_step": generation.last_step,
        "last_step_at": format_time(generation.last_step_at),
        "copied_step": generation.copied_step,
        "last_loss": generation.last_loss,
        "seconds_without_progress": generation.seconds_without_progress,
        "steps_redone": generation.steps_redone,
        "micro_batches_redone": generation.micro_batches_redone,
        "downtime": downtime if generation.started_at is not None else None,
        "phases": [_make_phase_document(phase, now) for phase in generation_phases(generation)],
        "history": make_state_changes(generation.history),
    }


def generation_phases(generation: GenerationRow) -> list[accounting.GenerationPhase]:
    return accounting.list_phases(
        kind=generation.generation_kind,
        created_at=generation.created_at,
        running_at=next((entry["at"] for entry in generation.history if entry["state"] == "running"), None),
        first_step_at=generation.started_at,
        stop_requested_at=generation.stop_requested_at,
        ended_at=generation.ended_at,
    )


def _make_phase_document(phase: accounting.GenerationPhase, now: float) -> PhaseDocument:
    end = now if phase.end is None else phase.end
    return {
        "name": phase.name,
        "start": format_time(phase.start),
        "end": format_time(phase.end),
        "seconds": max(end - phase.start, 0.0),
    }


def make_event_document(event: EventRow, job_name: str | None) -> EventDocument:
    """`job_name`: of the event's job."""
    return {
        "id": event.id,
        "at": format_time(event.at),
        "job_id": event.job_id,
        "job_name": job_name,
        "generation": event.generation,
        "vm_id": event.vm_id,
        "kind": event.kind,
        "message": event.message,
        "data": event.data,
    }


def make_step_document(row: Any) -> StepMetricsDocument:
    """`row`: with the columns of MetricRow."""
    return {
        "step": row.step,
        "loss": row.loss,
        "step_s": row.step_s,
        "between_s": row.between_s,
        "examples": row.examples,
        "gradient_norm": row.gradient_norm,
        "learning_rate": row.learning_rate,
        "generation": row.generation,
        "at": format_time(row.at),
    }


def make_checkpoint_document(checkpoint: CheckpointRow) -> CheckpointDocument:
    return {
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "url": checkpoint.url,
        "total_bytes": checkpoint.total_bytes,
        "at": format_time(checkpoint.at),
    }
