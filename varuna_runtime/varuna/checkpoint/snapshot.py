"""A copy of one rank's share of the training state in host memory, cut into files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varuna.checkpoint.encoding import encode
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.group_options import encode_groups
from varuna.checkpoint.manifest import Cursor, FileKind, Per, SavedGroup
from varuna.checkpoint.registered import Named, by_section, split
from varuna.checkpoint.shares import share_of
from varuna.checkpoint.state import METADATA_STATE, TrainingState

__all__ = ["HostBuffers", "HostFile", "RegisteredCopy", "Snapshot", "snapshot", "state_file"]

_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A file to be: tensors in host memory that nothing else changes."""

    name: str
    kind: FileKind
    section: int
    holds: tuple[str, ...]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    is_frozen: bool = False
    """Whether an earlier checkpoint may well have the same file."""


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
    cursor: Cursor | None
    tensors_of: dict[int, int]
    """For each section of the stage: how many tensors its replicas write together."""
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
    """Copy what this rank has to write: its replica's share of the stage, rank 0 the states that belong to none.

    Raises CheckpointError for state that a checkpoint cannot hold.
    """
    files: list[HostFile] = []
    rests, named = _split_states(state, rank)
    parts: dict[tuple[int, bool, bool], list[str]] = {}
    for name in share_of(state, replica, replicas):
        parts.setdefault((state.section_of[name], name in state.tied, name in state.frozen), []).append(name)
    for (section, tied, frozen), names in parts.items():
        part = f"-d{replica}" if replica else ""
        stem = f"section-{section:05d}-g{generation}{part}{'.tied' * tied}{'.frozen' * frozen}"
        files.extend(_section_files(state, section, stem, names, buffers))
        files.extend(_further_files(state, section, stem, names, named, buffers))
    groups: tuple[SavedGroup, ...] = ()
    if replica == 0:
        groups, options = encode_groups(state.optimizers, state.names_by_id, state.schedulers, f"rank{rank}")
        if options:
            files.append(_host_file(f"options-g{generation}-r{rank}", FileKind.OPTIONS, -1, (), options, {}, buffers))
    values = {name: encode(rest, f"/user/{name}") for name, rest in rests.items()}
    tensors = {key: tensor for _, of_state in values.values() for key, tensor in of_state.items()}
    file = state_file(generation, rank)
    copied: dict[str, Tensor] = {}
    if tensors:
        files.append(_host_file(file.removesuffix(_SUFFIX), FileKind.STATE, -1, (), tensors, {}, buffers))
        copied = files[-1].tensors
    buffers.synchronize()
    held = Counter(state.section_of[name] for name in state.tensors)
    return Snapshot(
        step=step,
        section_count=state.section_count,
        seed=state.seed,
        cursor=state.cursor,
        tensors_of={section: held[section] for section in state.sections},
        files=tuple(replace(file, is_frozen=".frozen." in file.name) for file in files),
        groups=groups,
        registered={
            name: RegisteredCopy(
                per=state.user_per.get(name, Per.AUTO),
                value=value,
                tensors={key: copied[key] for key in of_state},
                file=file if of_state else "",
            )
            for name, (value, of_state) in values.items()
        },
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
        metadata = {METADATA_STATE: json.dumps(encoded)}
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
        kept = state.optimizer_state_of(values[name]) if name in state.parameters else None
        if kept is not None:
            by_parameter[name] = kept
    if by_parameter:
        encoded, tensors = encode(by_parameter, "")
        metadata = {METADATA_STATE: json.dumps(encoded)}
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
