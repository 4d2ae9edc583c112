"""Cutting a model into stages that run the user's own forward.

`trace` finds the model's sections in a dry run on fake tensors; `build_stage` makes the stage that runs some of them.
"""

from __future__ import annotations

from varuna.partition.cutting.model_map import ModelMap, Section
from varuna.partition.cutting.shapes import Boundary
from varuna.partition.errors import PartitionError
from varuna.partition.model_io.batch import batch_size_of, take_examples
from varuna.partition.model_io.loss import loss_of
from varuna.partition.stages.builder import ValueSource, build_stage
from varuna.partition.stages.recutting import recut_stage
from varuna.partition.stages.stage import Stage
from varuna.partition.tracing.trace import trace

__all__ = [
    "Boundary",
    "ModelMap",
    "PartitionError",
    "Section",
    "Stage",
    "ValueSource",
    "batch_size_of",
    "build_stage",
    "loss_of",
    "recut_stage",
    "take_examples",
    "trace",
]
