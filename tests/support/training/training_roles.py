"""What a training script's `Varuna` hides: tests and benchmarks look at its parts."""

from __future__ import annotations

from varuna import Varuna
from varuna.roles.training import TrainingRole

__all__ = ["training_role"]


def training_role(model: Varuna) -> TrainingRole:
    role = model._role
    assert isinstance(role, TrainingRole)
    return role
