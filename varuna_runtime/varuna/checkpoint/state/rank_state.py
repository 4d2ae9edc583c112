"""One rank's share of the training state, which a checkpoint is saved from and loaded into."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.encoding import decode_state
from varuna.checkpoint.format.manifest import SampleCursor, StateScope
from varuna.checkpoint.format.tensor_file import ALIGNMENT
from varuna.checkpoint.state.group_options import set_options
from varuna.checkpoint.state.registered import TensorNames

__all__ = [
    "METADATA_STATE",
    "ShapePosition",
    "TrainingState",
    "fill_averages",
    "fill_group_options",
    "fill_optimizer_states",
    "fill_values",
]

METADATA_STATE = "state"
"""The key in a file's metadata of the JSON that its tensors are part of."""


@dataclass(frozen=True, kw_only=True)
class ShapePosition:
    """A rank's position in a shape."""

    rank: int = 0
    p: int = 1
    d: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """One rank's state: a view on the live tensors, saved from and loaded into."""

    sections: range
    """Sections of this rank's stage."""
    section_count: int
    """Sections of the whole model."""
    parameters: Mapping[str, Tensor]
    """Every parameter that the stage uses, by its first name in `named_parameters`."""
    section_of: Mapping[str, int]
    """For each parameter and buffer: the first section of the whole model that uses it."""
    tied: Collection[str] = ()
    """Parameters that sections of several stages may share. Each lies in a file that other stages can read alone."""
    optimizers: Sequence[Optimizer] = ()
    """No parameter belongs to two of them."""
    schedulers: Mapping[str, LRScheduler] = field(default_factory=dict)
    """The registered LR schedulers, by their names in `user`."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Buffers that training changes (running statistics), by name."""
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """Moving averages of parameters, by the parameter's name."""
    user: Mapping[str, Any] = field(default_factory=dict)
    """Other states to restore, such as schedulers and the loss scale: nested JSON values, numbers and tensors."""
    user_scopes: Mapping[str, StateScope] = field(default_factory=dict)
    """The scope of each state in `user`; AUTO by default."""
    position: ShapePosition = ShapePosition()
    seed: int = 0
    cursor: SampleCursor | None = None
    """The position of training in the samples."""
    state_dict: Mapping[str, str] = field(default_factory=dict)
    """For each name in the plain model's `state_dict()`: its name in `tensors`. For exporting a plain model."""
    before_load: Callable[[], None] = lambda: None
    """Called before a load changes the first of these."""

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.parameters, *self.buffers) if name not in self.section_of]
        if unknown:
            raise ValueError(f"section_of lacks {unknown[0]!r}: it must name the first section of every tensor")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that are not trained, and therefore rarely change."""
        return frozenset(name for name, value in self.parameters.items() if not value.requires_grad)

    @property
    def names_by_id(self) -> dict[int, str]:
        """The parameters' names by id."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    @property
    def names(self) -> TensorNames:
        return TensorNames(held=self.tensors, stored=self.state_dict)

    def optimizer_by_id(self) -> dict[int, Optimizer]:
        """The optimizer of each parameter, by the parameter's id."""
        return {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def optimizer_state_of(self, parameter: Tensor) -> Mapping[str, Any] | None:
        """The optimizer's state of a parameter; None: it has none."""
        # `in` first: an optimizer's state is a defaultdict, which a lookup would change.
        return next((each.state[parameter] for each in self.optimizers if parameter in each.state), None)


def optimizer_states(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter in an optimizer file. Raises CheckpointError when it is malformed."""
    if METADATA_STATE not in metadata:
        raise CheckpointError("a file that should hold the optimizer's state holds none")
    decoded: dict[str, dict[str, Any]] = decode_state(json.loads(metadata[METADATA_STATE]), tensors)
    return decoded


def fill_values(state: TrainingState, values: Mapping[str, Tensor]) -> None:
    """Copy loaded, verified values into the live tensors of these names that this rank has."""
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            if name in values:
                tensor.copy_(values[name])


def fill_averages(state: TrainingState, averages: Mapping[str, Tensor]) -> None:
    """Copy loaded moving averages into those that this rank has."""
    with torch.no_grad():
        for name, average in state.averages.items():
            if name in averages:
                average.copy_(averages[name])


def fill_optimizer_states(state: TrainingState, states: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Load verified states of these parameters into the optimizers; None: the parameter has no state."""
    optimizer_of = state.optimizer_by_id()
    for name, loaded in states.items():
        parameter = state.parameters[name]
        # A parameter that is in no group may be added to one later, by a script that unfreezes layers.
        optimizer = optimizer_of.get(id(parameter), state.optimizers[0] if len(state.optimizers) == 1 else None)
        if optimizer is None:
            continue
        if loaded is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = {
                key: _place_value(key, value, parameter, optimizer) for key, value in loaded.items()
            }


def fill_group_options(state: TrainingState, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Load options into the parameter groups of each optimizer."""
    for optimizer, options in zip(state.optimizers, groups, strict=True):
        for group, loaded in zip(optimizer.param_groups, options, strict=True):
            set_options(group, loaded)


def _place_value(key: str, value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """`value` on the device that the optimizer wants, in memory of its own; without a copy if possible.

    The rule is `torch.optim.Optimizer.load_state_dict`'s: state lives with its parameter, except that the step count
    stays on the CPU unless the optimizer runs fused or captured.
    """
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        holding = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        group = next(holding, optimizer.defaults)
        if not (group.get("capturable") or group.get("fused")):
            return value.clone()
    if value.device == parameter.device and value.data_ptr() % ALIGNMENT == 0:
        return value
    return value.to(device=parameter.device, copy=True)
