"""Building a stage: the model's structure with memory for the stage's own parameters only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from varuna.partition.copies import copy_with
from varuna.partition.ghost import Zeros
from varuna.partition.hooks import copy_gradient_hooks
from varuna.partition.initialise import initialise
from varuna.partition.model_map import ModelMap, first_names
from varuna.partition.modes import set_modes
from varuna.partition.special_parameters import parameter_like
from varuna.partition.stage import Stage

__all__ = ["Values", "buffers_read", "build_stage"]


class Values(Protocol):
    """Where a model's parameters and buffers, by their first names, have their values from, if not from the model."""

    def __contains__(self, name: object, /) -> bool: ...

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fills `tensor` with the value of `name`."""


class _NoValues:
    def __contains__(self, name: object, /) -> bool:
        return False

    def read_into(self, name: str, tensor: Tensor) -> None:
        raise KeyError(name)


def build_stage(
    model: nn.Module,
    model_map: ModelMap,
    first_section: int,
    end_section: int,
    device: torch.device | str,
    values: Values | None = None,
) -> Stage:
    """The stage that runs sections `first_section` … `end_section`-1 on `device`.

    `model` stays as it is; the stage has a copy of its structure, in the modes of the dry run, with copies of its own
    parameters and buffers, or with what `values` has for them: that alone is read. What then is left of those on `meta`
    is made on the device and initialised by the model's own modules, so that every split gives the same model (see
    initialise.py).

    Raises:
        PartitionError: the model cannot be cut here, or something on `meta` cannot be initialised.
        ValueError: no such sections.
    """
    count = len(model_map.sections)
    if not 0 <= first_section < end_section <= count:
        raise ValueError(f"sections {first_section} … {end_section - 1} are not a part of the model's 0 … {count - 1}")
    device = torch.device(device)
    sections = range(first_section, end_section)
    made = _Made(device, _NoValues() if values is None else values)
    memo: dict[int, object] = {}
    parameters = _parameters(model, model_map, sections, made, memo)
    buffers = _buffers(model, model_map, sections, made, memo)
    copied = copy_with(model, memo)
    copy_gradient_hooks(model, parameters, memo, _names_of_hollow(model, model_map, parameters, memo))
    initialise(copied, made.empty)
    set_modes(copied, model_map.modes)
    own_buffers = {name for section in sections for name in model_map.sections[section].buffers}
    own = {name: buffer for name, buffer in buffers.items() if name in own_buffers}
    return Stage(copied, model_map, sections, device, parameters, own, buffers)


def _parameters(
    model: nn.Module,
    model_map: ModelMap,
    sections: range,
    new: _Made,
    memo: dict[int, object],
) -> dict[str, nn.Parameter]:
    """Fill `memo` with what stands for each parameter; returns the stage's own ones, by first name."""
    own = {name for section in sections for name in model_map.sections[section].parameters}
    made: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = model_map.first_name[name]
        if first not in made:
            if first in own:
                made[first] = new.parameter(first, parameter)
            else:
                hollow = new.zeros.expanded(parameter.shape, parameter.dtype)
                made[first] = parameter_like(parameter, hollow, requires_grad=False)
        memo[id(parameter)] = made[first]
    return {name: parameter for name, parameter in made.items() if name in own}


def _names_of_hollow(
    model: nn.Module, model_map: ModelMap, own: dict[str, nn.Parameter], memo: dict[int, object]
) -> dict[int, str]:
    """By the id of what stands for it here: each parameter that is another stage's."""
    named = model.named_parameters(remove_duplicate=False)
    return {id(memo[id(parameter)]): name for name, parameter in named if model_map.first_name[name] not in own}


def _buffers(
    model: nn.Module,
    model_map: ModelMap,
    sections: range,
    new: _Made,
    memo: dict[int, object],
) -> dict[str, Tensor]:
    """Fill `memo` with what stands for each buffer; returns those that this stage's run of the forward reads."""
    first_name, _ = first_names(model.named_buffers(remove_duplicate=False))
    held = buffers_read(model_map, first_name.values(), sections)
    made: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        first = first_name[name]
        if first not in made:
            read = first in held
            # Code before the stage that still runs may write to it: then it needs memory, though nobody reads it.
            real = read or first in model_map.graph.buffers_changed
            made[first] = (
                new.tensor(first, buffer, used=read) if real else new.zeros.expanded(buffer.shape, buffer.dtype)
            )
        memo[id(buffer)] = made[first]
    return {name: buffer for name, buffer in made.items() if name in held}


def buffers_read(model_map: ModelMap, names: Iterable[str], sections: range) -> set[str]:
    """Those of the buffers `names` that a run of the forward in the stage of `sections` reads."""
    used = model_map.graph.buffers_used
    before = model_map.plan(sections.start).buffers if sections.start > 0 else frozenset()
    return {
        name for name in names if name in before or any(section in sections for section in used.get(name, sections))
    }


class _Made:
    """The new stage's tensors: memory on its device, with values."""

    def __init__(self, device: torch.device, values: Values) -> None:
        self.zeros = Zeros(device)
        self.empty: dict[str, Tensor] = {}  # those that have no values yet, by first name
        self._device = device
        self._values = values

    def parameter(self, name: str, original: nn.Parameter) -> nn.Parameter:
        """A copy of the model's parameter, with the value that `Values` has for it."""
        values = self.tensor(name, original.detach())
        made = parameter_like(original, values, requires_grad=original.requires_grad)
        if name in self.empty:
            self.empty[name] = made  # the object that the modules will hold
        return made

    def tensor(self, name: str, original: Tensor, *, used: bool = True) -> Tensor:
        """A copy of the model's tensor, with the value that `Values` has for it; one not `used` may have any value."""
        if not used:
            return torch.zeros_like(original, device=self._device)
        if name not in self._values and not original.is_meta:
            return original.to(self._device, copy=True)
        made = torch.empty_like(original, device=self._device)
        if name in self._values:
            self._values.read_into(name, made)
        else:
            self.empty[name] = made
        return made
