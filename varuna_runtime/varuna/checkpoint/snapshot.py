"""A copy of one rank's share of the training state in host memory, cut into files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varuna.checkpoint.encoding import encode
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.manifest import Cursor, FileKind
from varuna.checkpoint.shares import share_of
from varuna.checkpoint.state import METADATA_STATE, TrainingState, group_options, optimizer_name

__all__ = ["HostBuffers", "HostFile", "Snapshot", "snapshot"]


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
class Snapshot:
    """One rank's share of the state after `step` steps, copied."""

    step: int
    section_count: int
    seed: int
    cursor: Cursor | None
    tensors_of: dict[int, int]
    """For each section of the stage: how many tensors its replicas write together."""
    files: tuple[HostFile, ...]
    optimizer: str | None
    state: dict[str, Any]
    """User states and optimizer options, encoded; empty except on rank 0."""
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
    groups: dict[tuple[int, bool, bool], list[str]] = {}
    for name in share_of(state, replica, replicas):
        groups.setdefault((state.section_of[name], name in state.tied, name in state.frozen), []).append(name)
    for (section, tied, frozen), names in groups.items():
        part = f"-d{replica}" if replica else ""
        stem = f"section-{section:05d}-g{generation}{part}{'.tied' * tied}{'.frozen' * frozen}"
        files.extend(_section_files(state, section, stem, names, buffers))
    encoded: dict[str, Any] = {}
    if rank == 0:
        encoded, tensors = encode({"user": dict(state.user), "optimizer_groups": group_options(state.optimizer)}, "")
        if tensors:
            files.append(_host_file(f"state-g{generation}", FileKind.STATE, -1, (), tensors, {}, buffers))
    buffers.synchronize()
    held = Counter(state.section_of[name] for name in state.tensors)
    return Snapshot(
        step=step,
        section_count=state.section_count,
        seed=state.seed,
        cursor=state.cursor,
        tensors_of={section: held[section] for section in state.sections},
        files=tuple(replace(file, is_frozen=".frozen." in file.name) for file in files),
        optimizer=optimizer_name(state.optimizer),
        state=encoded,
        state_dict=dict(state.state_dict),
    )


def _section_files(
    state: TrainingState, section: int, stem: str, names: list[str], buffers: HostBuffers
) -> list[HostFile]:
    values = {name: state.tensors[name] for name in names}
    files = [_host_file(f"{stem}.parameters", FileKind.PARAMETERS, section, tuple(names), values, {}, buffers)]
    if state.optimizer is None:
        return files
    kept = state.optimizer.state
    # `in` first: the optimizer's state is a defaultdict, which a look-up would change.
    by_parameter = {name: kept[values[name]] for name in names if name in state.parameters and values[name] in kept}
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
    return HostFile(
        name=f"{stem}.safetensors", kind=kind, section=section, holds=holds, tensors=copies, metadata=metadata
    )
