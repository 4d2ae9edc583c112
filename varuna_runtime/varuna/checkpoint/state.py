"""One rank's share of the training state: cut into files for saving, filled from files when loading."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.encoding import decode, encode
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.group_options import encode_groups, set_options
from varuna.checkpoint.manifest import FileKind, Per, SavedGroup
from varuna.checkpoint.registered import Named, Names, by_section, split
from varuna.checkpoint.tensor_file import ALIGNMENT

__all__ = [
    "HostBuffers",
    "HostFile",
    "Place",
    "RegisteredCopy",
    "Snapshot",
    "TrainingState",
    "fill",
    "snapshot",
    "state_file",
]

_METADATA_STATE = "state"
"""Under this key a file's metadata holds the JSON that its tensors are part of."""

_SUFFIX = ".safetensors"


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
    def names_by_id(self) -> dict[int, str]:
        """Of the parameters, by id."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def optimizer_of(self) -> dict[int, Optimizer]:
        """Which optimizer steps a parameter, by the parameter's id."""
        return {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    @property
    def names(self) -> Names:
        return Names(held=self.tensors, stored=self.state_dict)


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A file to be: tensors in host memory that nothing else changes."""

    name: str
    kind: FileKind
    section: int
    holds: tuple[str, ...]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class RegisteredCopy:
    """One of the user's states on one rank, without what lies in files of sections."""

    per: Per
    value: Any
    """Encoded."""
    tensors: dict[str, Tensor]
    """Those that `value` names, in host memory."""
    file: str
    """Which has them; "" for none."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's share of the state after `step` steps, copied."""

    step: int
    section_count: int
    seed: int
    sections: tuple[int, ...]
    files: tuple[HostFile, ...]
    groups: tuple[SavedGroup, ...]
    """The optimizers' parameter groups; empty except in replica 0."""
    registered: dict[str, RegisteredCopy]
    state_dict: dict[str, str]


class HostBuffers:
    """Host memory for snapshots, kept between them: fresh pages cost several times the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """A contiguous copy of `tensor` in host memory, valid until the next copy under `key`.

        Copies from a GPU are only queued: call `synchronize` when all are.
        """
        if tensor.layout is not torch.strided:
            raise CheckpointError(f"{key} is a {tensor.layout} tensor: a checkpoint holds dense ones")
        source = tensor.detach()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        if source.is_cuda:
            self._devices.add(source.device)
        buffer.copy_(source, non_blocking=True)
        return buffer

    def synchronize(self) -> None:
        """Wait until all copies are there."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def snapshot(
    state: TrainingState, step: int, *, generation: int, replica: int, replicas: int, rank: int, buffers: HostBuffers
) -> Snapshot:
    """Copy what this rank has to write: section i of its stage where i mod D is its replica, rank 0 the rest too.

    Raises CheckpointError for state that a checkpoint cannot hold.
    """
    mine = tuple(section for section in state.sections if section % replicas == replica)
    files: list[HostFile] = []
    rests, named = _split_states(state, rank)
    for section in mine:
        names = [name for name in state.tensors if state.section_of[name] == section]
        for suffix, part in (
            ("", [name for name in names if name not in state.tied]),
            (".tied", [name for name in names if name in state.tied]),
        ):
            if part:
                stem = f"section-{section:05d}-g{generation}{suffix}"
                files.extend(_section_files(state, section, stem, part, buffers))
                files.extend(_further_files(state, section, stem, part, named, buffers))
    groups: tuple[SavedGroup, ...] = ()
    if replica == 0:
        groups, options = encode_groups(state.optimizers, state.names_by_id, state.schedulers, f"rank{rank}")
        if options:
            files.append(_host_file(f"options-g{generation}-r{rank}", FileKind.OPTIONS, -1, (), options, {}, buffers))
    values = {name: encode(rest, f"/user/{name}") for name, rest in rests.items()}
    tensors: dict[str, Tensor] = {}
    for _, of_state in values.values():
        tensors |= of_state
    file = state_file(generation, rank)
    copied: dict[str, Tensor] = {}
    if tensors:
        files.append(_host_file(file.removesuffix(_SUFFIX), FileKind.STATE, -1, (), tensors, {}, buffers))
        copied = files[-1].tensors
    buffers.synchronize()
    registered = {
        name: RegisteredCopy(
            per=state.user_per.get(name, Per.AUTO),
            value=value,
            tensors={key: copied[key] for key in of_state},
            file=file if of_state else "",
        )
        for name, (value, of_state) in values.items()
    }
    return Snapshot(
        step=step,
        section_count=state.section_count,
        seed=state.seed,
        sections=mine,
        files=tuple(files),
        groups=groups,
        registered=registered,
        state_dict=dict(state.state_dict),
    )


def state_file(generation: int, rank: int) -> str:
    """The name of a rank's file of tensors that belong to no section."""
    return f"state-g{generation}{'' if rank == 0 else f'-r{rank}'}{_SUFFIX}"


def _split_states(state: TrainingState, rank: int) -> tuple[dict[str, Any], dict[str, Named]]:
    """The user's states without what belongs to sections, and that."""
    rests: dict[str, Any] = {}
    named: dict[str, Named] = {}
    for name, value in state.user.items():
        per = state.user_per.get(name, Per.AUTO)
        if per is Per.JOB and rank != 0:
            continue
        if per in (Per.AUTO, Per.SECTION):
            value, named[name] = split(value, state.names)
        rests[name] = value
    return rests, named


def _further_files(
    state: TrainingState,
    section: int,
    stem: str,
    names: list[str],
    named: Mapping[str, Named],
    buffers: HostBuffers,
) -> list[HostFile]:
    """Averages, and the user's states that are keyed by these names."""
    files: list[HostFile] = []
    averages = {name: state.averages[name] for name in names if name in state.averages}
    if averages:
        holds = tuple(averages)
        files.append(_host_file(f"{stem}.average", FileKind.AVERAGE, section, holds, averages, {}, buffers))
    content, found = by_section(named, names, state.names)
    if content:
        encoded, tensors = encode(content, "/user")
        metadata = {_METADATA_STATE: json.dumps(encoded)}
        holds = tuple(name for name in names if name in found)
        files.append(_host_file(f"{stem}.registered", FileKind.REGISTERED, section, holds, tensors, metadata, buffers))
    return files


def _section_files(
    state: TrainingState, section: int, stem: str, names: list[str], buffers: HostBuffers
) -> list[HostFile]:
    values = {name: state.tensors[name] for name in names}
    files = [_host_file(f"{stem}.parameters", FileKind.PARAMETERS, section, tuple(names), values, {}, buffers)]
    by_parameter: dict[str, Any] = {}
    for name in names:
        for optimizer in state.optimizers if name in state.parameters else ():
            if values[name] in optimizer.state:  # `in` first: it is a defaultdict, which a look-up would change
                by_parameter[name] = optimizer.state[values[name]]
    if by_parameter:
        encoded, tensors = encode(by_parameter, "")
        metadata = {_METADATA_STATE: json.dumps(encoded)}
        holds = tuple(by_parameter)
        files.append(_host_file(f"{stem}.optimizer", FileKind.OPTIMIZER, section, holds, tensors, metadata, buffers))
    return files


def _host_file(
    stem: str,
    kind: FileKind,
    section: int,
    holds: tuple[str, ...],
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    buffers: HostBuffers,
) -> HostFile:
    copies = {name: buffers.copy(f"{kind.value}:{name}", tensor) for name, tensor in tensors.items()}
    return HostFile(name=f"{stem}{_SUFFIX}", kind=kind, section=section, holds=holds, tensors=copies, metadata=metadata)


def optimizer_states(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter in an optimizer file. Raises CheckpointError when it is none."""
    if _METADATA_STATE not in metadata:
        raise CheckpointError("a file that should hold the optimizer's state holds none")
    decoded: dict[str, dict[str, Any]] = decode(json.loads(metadata[_METADATA_STATE]), tensors)
    return decoded


def fill(
    state: TrainingState,
    values: Mapping[str, Tensor],
    optimizer_state: Mapping[str, dict[str, Any]],
    groups: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    """Put loaded values, all verified, into the live tensors and the optimizers.

    `groups`: the options of each optimizer's groups.
    """
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            tensor.copy_(values[name])
    optimizer_of = state.optimizer_of()
    for name, parameter in state.parameters.items():
        # One that no group holds may be added to a group later, as scripts do that unfreeze layers.
        optimizer = optimizer_of.get(id(parameter), state.optimizers[0] if len(state.optimizers) == 1 else None)
        if optimizer is None:
            continue
        if name in optimizer_state:
            optimizer.state[parameter] = {
                key: _placed(key, value, parameter, optimizer) for key, value in optimizer_state[name].items()
            }
        else:
            optimizer.state.pop(parameter, None)
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
