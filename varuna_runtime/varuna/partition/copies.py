"""Copies of the user's model in which something stands for its tensors."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from varuna.partition.errors import PartitionError

__all__ = ["copy_with"]


def copy_with(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of `model` in which the objects in `memo` (by id) are replaced by what stands there.

    Raises:
        PartitionError: something that the model holds cannot be copied.
    """
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise PartitionError(
            f"{type(model).__name__} holds something that cannot be copied ({error}); keep files, locks, process "
            "groups and activations out of the model's attributes"
        ) from error
