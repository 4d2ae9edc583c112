"""A model without the memory of its parameters, kept to be traced again when the script changes something of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.copies import copy_with
from varuna.partition.errors import PartitionError
from varuna.partition.special_parameters import parameter_like

__all__ = ["skeleton_of"]


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of the module tree with parameters on `meta`.

    Buffers, and tensors that modules hold in plain attributes, are the model's own: code may look at their values.

    Raises:
        PartitionError: something that the model holds cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise PartitionError(f"parameter {name} has no shape yet (a lazy module); run the model once before Varuna")
        hollow = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = parameter_like(parameter, hollow, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for held in (*module._buffers.values(), *module.__dict__.values()):
            if isinstance(held, Tensor):
                memo.setdefault(id(held), held)
    return copy_with(model, memo)
