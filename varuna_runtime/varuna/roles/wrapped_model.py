"""The model that a script wraps, after the dry run: the start of every role."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from varuna.assembly.trace_agreement import describe_trace, digest_trace, require_same_trace
from varuna.calibration.subject import CalibrationSubject
from varuna.checkpoint.loading.pretrained import PretrainedWeights
from varuna.checkpoint.state.stage_state import state_dict_names
from varuna.devices.generators import keep_global_generators
from varuna.inspection.report import write_refusal
from varuna.optim.precision import TrainingPrecision
from varuna.partition import ModelMap, PartitionError, ValueSource, trace
from varuna.partition.model_io.example_inputs import GetBatch
from varuna.worker.worker import WorkerProcess
from varuna_proto.environment import Mode

__all__ = ["Boundaries", "ModelOptions", "TracedModel", "WrappedModel", "trace_model", "wrap_model"]

Boundaries = Literal["bf16"]
"""The types in which tensors may cross stages, other than those that the model gives them."""

_TRACE_EXAMPLES = 2
"""Examples in the batch of the dry run."""


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """What the dry run gives."""

    model_map: ModelMap
    examples: Mapping[str, Any]
    """Its inputs."""


@dataclass(frozen=True, kw_only=True)
class WrappedModel:
    """A model, its map, and where and how this process computes with it."""

    worker: WorkerProcess
    device: torch.device
    precision: TrainingPrecision
    model: nn.Module
    model_map: ModelMap
    get_batch: GetBatch
    examples: Mapping[str, Any]
    """The inputs of the dry run."""
    trace_digest: str
    """The same on all ranks that have traced the same model."""
    tensor_names: Mapping[str, str]
    """Every name in the model's `state_dict()`, with the name that the tensor is stored under."""
    values: ValueSource | None = None
    """Of parameters and buffers, where they are not the model's own."""

    def calibration_subject(self) -> CalibrationSubject:
        return CalibrationSubject(self.model, self.model_map, self.get_batch, self.device, self.precision, self.values)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How to read the model: the arguments of `Varuna` with these names."""

    shared_weights: Sequence[tuple[str, str]] = ()
    cut_points: int | None = None
    random_by_example: bool = True
    boundaries: Boundaries | None = None
    weights: str | os.PathLike[str] | None = None


def trace_model(
    device: torch.device,
    precision: TrainingPrecision,
    *,
    model: nn.Module,
    get_batch: GetBatch,
    options: ModelOptions,
) -> TracedModel:
    """Runs the model on example inputs to find where it can be cut. Needs no other rank, and no memory of the device.

    Raises PartitionError when the model cannot be cut, ValueError for boundaries of a type that it does not compute in.
    """
    crosses_as = _find_crossing_type(options.boundaries, precision)
    with keep_global_generators(device), precision.dry_run_context():
        examples = get_batch(_TRACE_EXAMPLES)
        model_map = trace(model, examples, shared_weights=options.shared_weights, cut_points=options.cut_points)
    model_map = replace(model_map, random_by_example=options.random_by_example, crosses_as=crosses_as)
    return TracedModel(model_map=model_map, examples=examples)


def _find_crossing_type(boundaries: str | None, precision: TrainingPrecision) -> torch.dtype | None:
    if boundaries is None:
        return None
    if boundaries != "bf16":
        raise ValueError(f"boundaries={boundaries!r}: give 'bf16', or leave it out")
    if precision.dtype is not torch.bfloat16:
        raise ValueError(
            f"boundaries='bf16', but the model computes in {precision.dtype}: train with dtype=torch.bfloat16, or "
            "leave it out"
        )
    return torch.bfloat16


def wrap_model(
    worker: WorkerProcess,
    device: torch.device,
    precision: TrainingPrecision,
    *,
    model: nn.Module,
    get_batch: GetBatch,
    options: ModelOptions,
    traced: TracedModel | None = None,
) -> WrappedModel:
    """The model with the map that all ranks have of it. Called by all ranks.

    `traced`: what `trace_model` gave before this process had its rank; None: it was not called.

    A rank that joins survivors is not compared here: they know the digest of their trace.

    Raises PartitionError when the model cannot be cut, ValueError when this rank's trace differs from rank 0's.
    """
    environment = worker.environment
    try:
        traced = traced or trace_model(device, precision, model=model, get_batch=get_batch, options=options)
    except PartitionError as error:
        if environment.mode is Mode.INSPECT:
            write_refusal(environment, error)
        raise
    model_map, examples = traced.model_map, traced.examples
    worker.phases.end_phase("trace")
    facts = describe_trace(model, model_map, examples, precision)
    if environment.world_size > 1 and not environment.joins_survivors:
        require_same_trace(facts, worker.rendezvous, environment.rank)
    names, values = state_dict_names(model, model_map), None
    if options.weights is not None:
        values = PretrainedWeights(options.weights, model, names, logs_differences=environment.rank == 0)
    return WrappedModel(
        worker=worker,
        device=device,
        precision=precision,
        model=model,
        model_map=model_map,
        get_batch=get_batch,
        examples=examples,
        trace_digest=digest_trace(facts),
        tensor_names=names,
        values=values,
    )
