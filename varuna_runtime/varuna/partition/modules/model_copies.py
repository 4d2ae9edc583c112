"""Copies of the user's model in which other tensors replace its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.errors import PartitionError
from varuna.partition.modules.special_parameters import parameter_like

__all__ = ["copy_model", "make_skeleton"]


def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of `model` in which `memo` replaces objects, by their ids.

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


def make_skeleton(model: nn.Module) -> nn.Module:
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
    return copy_model(model, memo)
