"""One rank's share of the training state, which a checkpoint is saved from and loaded into."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.encoding import decode_state
from varuna.checkpoint.format.manifest import SampleCursor, StateScope
from varuna.checkpoint.format.tensor_file import ALIGNMENT
from varuna.checkpoint.state.group_options import OptionsByName, optimizer_name, set_options
from varuna.checkpoint.state.registered import TensorNames
from varuna.devices.accelerator import is_accelerator
from varuna.optim.optimizers import find_hidden_state

__all__ = [
    "METADATA_STATE",
    "OPTIMIZER_ENTRIES",
    "OptimizerEntries",
    "ShapePosition",
    "TrainingState",
    "fill_averages",
    "fill_group_options",
    "fill_optimizer_entries",
    "fill_optimizer_states",
    "fill_values",
    "list_optimizer_entries",
]

_log = structlog.get_logger(__name__)

METADATA_STATE = "state"
"""The key in a file's metadata of the JSON that its tensors are part of."""

OPTIMIZER_ENTRIES = "varuna.optimizer.state"
"""The name among the user's states of the `OptimizerEntries`."""

OptimizerEntries = list[Any]
"""What optimizers keep in `state` under keys that are no tensors: for each optimizer that has such entries its place
among the script's, its class, and for each entry the key, the value, and whether that is on an accelerator."""


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
    """Parameters and buffers that several stages may share. Each lies in a file that other stages can read alone."""
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
    start_averages: Callable[[Collection[str]], Mapping[str, Tensor]] | None = None
    """Gives averages of these parameters to load into; None: only `averages` are loaded."""
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


def fill_optimizer_states(
    state: TrainingState, states: Mapping[str, Mapping[str, Any] | None], saved: OptionsByName
) -> None:
    """Load verified states of these parameters into the optimizers; None: the parameter has no state.

    `saved`: the groups that the parameters were in.
    """
    optimizer_of = state.optimizer_by_id()
    for name, loaded in states.items():
        parameter = state.parameters[name]
        # A parameter that is in no group may be added to one later, by a script that unfreezes layers.
        optimizer = optimizer_of.get(id(parameter)) or saved.find_optimizer(name, state.optimizers)
        if optimizer is None and len(state.optimizers) == 1:  # an earlier version does not say
            optimizer = state.optimizers[0]
        if optimizer is None:
            continue
        if loaded is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = {
                key: _place_value(key, value, parameter, optimizer) for key, value in loaded.items()
            }


def list_optimizer_entries(optimizers: Sequence[Optimizer]) -> OptimizerEntries:
    """Raises CheckpointError for an optimizer that keeps state where no checkpoint finds it."""
    found: OptimizerEntries = []
    for place, optimizer in enumerate(optimizers):
        if hidden := find_hidden_state(optimizer):
            raise CheckpointError(hidden)
        entries = [[key, value, _is_on_accelerator(value)] for key, value in _entries(optimizer).items()]
        if entries:
            found.append([place, optimizer_name(optimizer), entries])
    return found


def fill_optimizer_entries(optimizers: Sequence[Optimizer], loaded: OptimizerEntries) -> None:
    """Load entries into the optimizers of the same places and classes. Without any for one, it keeps its own."""
    by_place = {(place, name): entries for place, name, entries in loaded}
    for place, optimizer in enumerate(optimizers):
        own, entries = _entries(optimizer), by_place.get((place, optimizer_name(optimizer)))
        if entries is None:
            if own:
                _log.warning(
                    "the loaded state has nothing of what the optimizer keeps beside its parameters' state: these "
                    "entries stay as the script has made them",
                    entries=[str(key) for key in own],
                )
            continue
        for key in own:
            del optimizer.state[key]
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        for key, value, on_accelerator in entries:
            optimizer.state[key] = _copy_entry(value, device if on_accelerator else torch.device("cpu"))


def _copy_entry(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)


def _entries(optimizer: Optimizer) -> dict[Any, Any]:
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _is_on_accelerator(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and is_accelerator(leaf.device) for leaf in tree_leaves(value))


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
