"""Training and evaluation mode of a model's modules, by their paths."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from varuna.partition.modules.model_copies import make_skeleton

__all__ = ["modes_of", "modes_to_train_in", "set_modes"]


def modes_of(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


def modes_to_train_in(model: nn.Module) -> dict[str, bool]:
    """The modes in which a model is presumably trained.

    They are its own, with one exception: if all modules are in evaluation mode, as after `from_pretrained`, scripts
    call `train()` later. A module in evaluation mode beside others in training mode is frozen and stays so.
    """
    modes = modes_of(model)
    # On a copy: a model's own `train` may keep parts of it in evaluation mode.
    return modes if any(modes.values()) else modes_of(make_skeleton(model).train())


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    for path, module in model.named_modules():
        module.training = modes.get(path, module.training)
