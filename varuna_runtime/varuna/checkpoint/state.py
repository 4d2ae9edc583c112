"""One rank's share of the training state, as checkpoints see it: filled from files when one is loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from varuna.checkpoint.encoding import decode
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.manifest import Cursor
from varuna.checkpoint.tensor_file import ALIGNMENT

__all__ = [
    "METADATA_STATE",
    "TrainingState",
    "fill_group_options",
    "fill_optimizer_states",
    "fill_values",
]

METADATA_STATE = "state"
"""Under this key a file's metadata holds the JSON that its tensors are part of."""

_NOT_OPTIONS = frozenset({"params", "param_names"})
"""What a parameter group holds besides its options: it depends on P."""


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
    optimizer: Optimizer | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Buffers that training changes (running statistics), by name."""
    user: Mapping[str, Any] = field(default_factory=dict)
    """What else must come back: scheduler, loss scale. Rank 0's is stored; JSON values and tensors, nested."""
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


def optimizer_name(optimizer: Optimizer | None) -> str | None:
    return None if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def group_options(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """The options of each parameter group: learning rate and the like."""
    if optimizer is None:
        return []
    return [{key: value for key, value in group.items() if key not in _NOT_OPTIONS} for group in optimizer.param_groups]


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


def fill_optimizer_states(state: TrainingState, states: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Put loaded states of these parameters, all verified, into the optimizer; None: the optimizer has none for it."""
    assert state.optimizer is not None
    for name, loaded in states.items():
        parameter = state.parameters[name]
        if loaded is None:
            state.optimizer.state.pop(parameter, None)
        else:
            state.optimizer.state[parameter] = {
                key: _placed(key, value, parameter, state.optimizer) for key, value in loaded.items()
            }


def fill_group_options(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Put loaded options into the optimizer's parameter groups."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _placed(key: str, value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """`value` where the optimizer wants it, in memory that nothing else uses: if it can, that which it was read into.

    The rule is `torch.optim.Optimizer.load_state_dict`'s: state lives with its parameter, except that the step count
    stays on the CPU unless the optimizer runs fused or captured.
    """
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        if not (group.get("capturable") or group.get("fused")):
            return value.clone()
    if value.device == parameter.device and value.data_ptr() % ALIGNMENT == 0:
        return value
    return value.to(device=parameter.device, copy=True)
