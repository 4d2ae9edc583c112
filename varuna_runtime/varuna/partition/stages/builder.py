"""Building a stage: the model's structure with memory for the stage's own parameters only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from varuna.partition.cutting.model_map import ModelMap, first_names
from varuna.partition.modules.model_copies import copy_model
from varuna.partition.modules.modes import set_modes
from varuna.partition.modules.special_parameters import parameter_like
from varuna.partition.stages.ghost import HollowTensors
from varuna.partition.stages.gradient_hooks import copy_gradient_hooks
from varuna.partition.stages.initial_values import initialise
from varuna.partition.stages.stage import Stage

__all__ = ["ValueSource", "build_stage"]


class ValueSource(Protocol):
    """A source of values for a model's parameters and buffers, by first names, other than the model itself."""

    def __contains__(self, name: object, /) -> bool: ...

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fills `tensor` with the value of `name`."""


class _EmptyValueSource:
    def __contains__(self, name: object, /) -> bool:
        return False

    def read_into(self, name: str, tensor: Tensor) -> None:
        raise KeyError(name)


def build_stage(
    model: nn.Module,
    model_map: ModelMap,
    first_section: int,
    end_section: int,
    *,
    device: torch.device | str,
    values: ValueSource | None = None,
    parameters_follow: bool = False,
) -> Stage:
    """The stage that runs sections `first_section` … `end_section`-1 on `device`.

    `model` stays as it is. The stage has a copy of its structure, in the modes of the dry run, with copies of its own
    parameters and buffers only, or with their values from `values`. Those on `meta` without such values are made on the
    device and initialised by the model's own modules, so that every split gives the same model (initial_values.py).

    `parameters_follow`: the caller gives parameters their values afterwards. Those that `values` or the modules would
    fill are as memory was, but for those beside a buffer that its module initialises.

    Raises:
        PartitionError: the model cannot be cut here, or something on `meta` cannot be initialised.
        ValueError: no such sections.
    """
    count = len(model_map.sections)
    if not 0 <= first_section < end_section <= count:
        raise ValueError(f"sections {first_section} … {end_section - 1} are not a part of the model's 0 … {count - 1}")
    device = torch.device(device)
    sections = range(first_section, end_section)
    made = _StageTensors(
        HollowTensors(device, needs_numbers=model_map.needs_numbers),
        _EmptyValueSource() if values is None else values,
        device=device,
        parameters_follow=parameters_follow,
    )
    memo: dict[int, object] = {}
    parameters = _parameters(model, model_map, sections, new=made, memo=memo)
    buffers = _buffers(model, model_map, sections, new=made, memo=memo)
    copied = copy_model(model, memo)
    copy_gradient_hooks(model, parameters, memo, _names_of_hollow(model, model_map, parameters, memo))
    initialise(copied, _find_with_buffers(copied, made.empty) if parameters_follow else made.empty)
    set_modes(copied, model_map.modes)
    return Stage(copied, model_map, sections=sections, device=device, parameters=parameters, read=buffers)


def _parameters(
    model: nn.Module,
    model_map: ModelMap,
    sections: range,
    *,
    new: _StageTensors,
    memo: dict[int, object],
) -> dict[str, nn.Parameter]:
    """Fills `memo` with the stage's tensor for each parameter. Returns its own parameters, by first name."""
    own = model_map.parameters_held(sections)
    made: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = model_map.first_name[name]
        if first not in made:
            if first in own:
                made[first] = new.make_parameter(first, parameter)
            else:
                placeholder = new.hollow.make_expanded(parameter.shape, parameter.dtype)
                made[first] = parameter_like(parameter, placeholder, requires_grad=False)
        memo[id(parameter)] = made[first]
    return {name: parameter for name, parameter in made.items() if name in own}


def _names_of_hollow(
    model: nn.Module, model_map: ModelMap, own: dict[str, nn.Parameter], memo: dict[int, object]
) -> dict[int, str]:
    """The names of other stages' parameters, by the id of the tensor that stands for them here."""
    named = model.named_parameters(remove_duplicate=False)
    return {id(memo[id(parameter)]): name for name, parameter in named if model_map.first_name[name] not in own}


def _buffers(
    model: nn.Module,
    model_map: ModelMap,
    sections: range,
    *,
    new: _StageTensors,
    memo: dict[int, object],
) -> dict[str, Tensor]:
    """Fills `memo` with the stage's tensor for each buffer. Returns those that the forward reads in this stage."""
    first_name, _ = first_names(model.named_buffers(remove_duplicate=False))
    held = model_map.buffers_read(first_name.values(), sections)
    made: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        first = first_name[name]
        if first not in made:
            read = first in held
            # Code of earlier sections that still runs may write to it: then it needs memory, though no code reads it.
            real = read or first in model_map.graph.buffers_changed
            made[first] = (
                new.make_tensor(first, buffer, used=read)
                if real
                else new.hollow.make_expanded(buffer.shape, buffer.dtype)
            )
        memo[id(buffer)] = made[first]
    return {name: buffer for name, buffer in made.items() if name in held}


def _find_with_buffers(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers among `tensors`, and the parameters of the same modules, which may be what computes the buffers."""
    ids = {id(tensor) for tensor in tensors.values()}
    needed: set[int] = set()
    for part in module.modules():
        if any(id(buffer) in ids for buffer in part._buffers.values()):
            needed.update(map(id, (*part._buffers.values(), *part._parameters.values())))
    return {name: tensor for name, tensor in tensors.items() if id(tensor) in needed}


class _StageTensors:
    """Makes the tensors of a new stage, with memory on its device and values."""

    def __init__(
        self, hollow: HollowTensors, values: ValueSource, *, device: torch.device, parameters_follow: bool
    ) -> None:
        self.hollow = hollow
        self.empty: dict[str, Tensor] = {}  # those that have no values yet, by first name
        self._device = device
        self._values = values
        self._parameters_follow = parameters_follow

    def make_parameter(self, name: str, original: nn.Parameter) -> nn.Parameter:
        """A copy of the model's parameter, with the value that the source has for it."""
        if self._parameters_follow and name in self._values:
            values = torch.empty_like(original.detach(), device=self._device)
        else:
            values = self.make_tensor(name, original.detach())
        made = parameter_like(original, values, requires_grad=original.requires_grad)
        if name in self.empty:
            self.empty[name] = made  # the object that the modules will hold
        return made

    def make_tensor(self, name: str, original: Tensor, *, used: bool = True) -> Tensor:
        """A copy of the model's tensor with the value from the source; one that is not `used` may have any value."""
        if not used:
            return self.hollow.make_dense(original.shape, original.dtype)
        if name not in self._values and not original.is_meta:
            return original.to(self._device, copy=True)
        made = torch.empty_like(original, device=self._device)
        if name in self._values:
            self._values.read_into(name, made)
        else:
            self.empty[name] = made
        return made
