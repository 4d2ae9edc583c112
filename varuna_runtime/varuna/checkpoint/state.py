"""One rank's share of the training state, as checkpoints see it: filled from files when one is loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.encoding import decode
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.group_options import set_options
from varuna.checkpoint.manifest import Cursor, Per
from varuna.checkpoint.registered import Names
from varuna.checkpoint.tensor_file import ALIGNMENT

__all__ = [
    "METADATA_STATE",
    "Place",
    "TrainingState",
    "fill_averages",
    "fill_group_options",
    "fill_optimizer_states",
    "fill_values",
]

METADATA_STATE = "state"
"""Under this key a file's metadata holds the JSON that its tensors are part of."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank of which shape this is."""

    rank: int = 0
    p: int = 1
    d: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What one rank holds: a view on the live tensors, saved from and loaded into."""

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
    """No parameter is in two of them."""
    schedulers: Mapping[str, LRScheduler] = field(default_factory=dict)
    """Those of them that are registered, by their names in `user`."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Buffers that training changes (running statistics), by name."""
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """Moving averages of parameters, by the parameter's name."""
    user: Mapping[str, Any] = field(default_factory=dict)
    """What else must come back: scheduler, loss scale. JSON values, numbers and tensors, nested."""
    user_per: Mapping[str, Per] = field(default_factory=dict)
    """What each of `user` belongs to; AUTO where it is not said."""
    place: Place = Place()
    seed: int = 0
    cursor: Cursor | None = None
    """The samples that training has used."""
    state_dict: Mapping[str, str] = field(default_factory=dict)
    """For each name in the plain model's `state_dict()`: its name in `tensors`. For exporting a plain model."""

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.parameters, *self.buffers) if name not in self.section_of]
        if unknown:
            raise ValueError(f"section_of lacks {unknown[0]!r}: it must name the first section of every tensor")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that are not trained, and so rarely change."""
        return frozenset(name for name, value in self.parameters.items() if not value.requires_grad)

    @property
    def names_by_id(self) -> dict[int, str]:
        """Of the parameters, by id."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    @property
    def names(self) -> Names:
        return Names(held=self.tensors, stored=self.state_dict)

    def optimizer_of(self) -> dict[int, Optimizer]:
        """Which optimizer steps a parameter, by the parameter's id."""
        return {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def optimizer_state_of(self, parameter: Tensor) -> Mapping[str, Any] | None:
        """What the optimizers keep for a parameter; None: nothing."""
        # `in` first: an optimizer's state is a defaultdict, which a look-up would change.
        return next((each.state[parameter] for each in self.optimizers if parameter in each.state), None)


def optimizer_states(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter in an optimizer file. Raises CheckpointError when it is none."""
    if METADATA_STATE not in metadata:
        raise CheckpointError("a file that should hold the optimizer's state holds none")
    decoded: dict[str, dict[str, Any]] = decode(json.loads(metadata[METADATA_STATE]), tensors)
    return decoded


def fill_values(state: TrainingState, values: Mapping[str, Tensor]) -> None:
    """Put loaded values, all verified, into the live tensors of these names, as far as this rank has them."""
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            if name in values:
                tensor.copy_(values[name])


def fill_averages(state: TrainingState, averages: Mapping[str, Tensor]) -> None:
    """Put loaded moving averages into those that this rank has."""
    with torch.no_grad():
        for name, average in state.averages.items():
            if name in averages:
                average.copy_(averages[name])


def fill_optimizer_states(state: TrainingState, states: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Put loaded states of these parameters, all verified, into the optimizers; None: there is none for it."""
    optimizer_of = state.optimizer_of()
    for name, loaded in states.items():
        parameter = state.parameters[name]
        # One that no group holds may be added to a group later, as scripts do that unfreeze layers.
        optimizer = optimizer_of.get(id(parameter), state.optimizers[0] if len(state.optimizers) == 1 else None)
        if optimizer is None:
            continue
        if loaded is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = {
                key: _placed(key, value, parameter, optimizer) for key, value in loaded.items()
            }


def fill_group_options(state: TrainingState, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Put loaded options into the parameter groups of each optimizer."""
    for optimizer, options in zip(state.optimizers, groups, strict=True):
        for group, loaded in zip(optimizer.param_groups, options, strict=True):
            set_options(group, loaded)


def _placed(key: str, value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """`value` where the optimizer wants it, in memory that nothing else uses: if it can, that which it was read into.

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
