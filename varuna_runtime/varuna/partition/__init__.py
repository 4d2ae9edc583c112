"""Cutting a model into stages that run the user's own forward (DESIGN.md, section 5).

`trace` learns the model's sections from a dry run on fake tensors; `build_stage` makes the stage that runs some of
them.
"""

from __future__ import annotations

from varuna.partition.batch import batch_size_of, loss_of, take_examples
from varuna.partition.build import Values, build_stage
from varuna.partition.errors import PartitionError
from varuna.partition.model_map import ModelMap, Section
from varuna.partition.shapes import Boundary
from varuna.partition.stage import Stage
from varuna.partition.trace import trace

__all__ = [
    "Boundary",
    "ModelMap",
    "PartitionError",
    "Section",
    "Stage",
    "Values",
    "batch_size_of",
    "build_stage",
    "loss_of",
    "take_examples",
    "trace",
]
