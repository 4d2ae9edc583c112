"""What a calibration measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from varuna.optim.precision import TrainingPrecision
from varuna.partition import ModelMap, ValueSource
from varuna.partition.model_io.example_inputs import GetBatch

__all__ = ["CalibrationSubject"]


@dataclass(frozen=True)
class CalibrationSubject:
    """A model with its map, and how it computes."""

    model: nn.Module
    model_map: ModelMap
    """The same on every rank, traced under `precision`."""
    get_batch: GetBatch
    device: torch.device
    precision: TrainingPrecision
    """The training's."""
    values: ValueSource | None = None
    """Of parameters and buffers, where they are not the model's own."""
