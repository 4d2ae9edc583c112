"""A copy of one rank's share of the training state in host memory, cut into files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.encoding import encode_state
from varuna.checkpoint.format.manifest import FileKind, SampleCursor, SavedGroup, StateScope
from varuna.checkpoint.saving.shares import choose_share, count_bytes
from varuna.checkpoint.state.group_options import encode_groups
from varuna.checkpoint.state.rank_state import (
    METADATA_STATE,
    OPTIMIZER_ENTRIES,
    TrainingState,
    list_optimizer_entries,
)
from varuna.checkpoint.state.registered import NamedEntries, select_entries, split_state
from varuna.devices.accelerator import is_accelerator, wait_for_stream
from varuna.devices.pinned_arena import PinnedArena

__all__ = ["HostBuffers", "HostFile", "RankSnapshot", "RegisteredCopy", "is_tied_file", "make_snapshot", "state_file"]

_SUFFIX = ".safetensors"
_TIED = ".tied"


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A file that is to be written: tensors in host memory that nothing else changes."""

    name: str
    kind: FileKind
    section: int
    holds: tuple[str, ...]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    is_frozen: bool = False
    """Whether an earlier checkpoint probably has the same file."""


@dataclass(frozen=True, kw_only=True)
class RegisteredCopy:
    """One of the user's states on one rank, without the entries that lie in files of sections."""

    per: StateScope
    value: Any
    """Encoded."""
    tensors: dict[str, Tensor]
    """The tensors that `value` names, in host memory."""
    file: str
    """The file that has them; "" for none."""


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """One rank's share of the state after `step` steps, copied."""

    step: int
    section_count: int
    seed: int
    cursor: SampleCursor | None
    tensors_of: dict[int, int]
    """For each section of the stage: how many tensors its replicas write together."""
    files: tuple[HostFile, ...]
    groups: tuple[SavedGroup, ...]
    """The optimizers' parameter groups; empty except in replica 0."""
    registered: dict[str, RegisteredCopy]
    state_dict: dict[str, str]


class HostBuffers:
    """Host memory for snapshots, reused because fresh pages cost several times the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._arena = PinnedArena()
        self._devices: set[torch.device] = set()

    def expect_bytes(self, count: int) -> None:
        """Before the first copies: tensors of so many bytes are going to be copied."""
        if not self._buffers:
            self._arena.expect_bytes(count)

    def copy_tensor(self, key: str, tensor: Tensor) -> Tensor:
        """A contiguous copy of `tensor` in host memory, valid until the next copy under `key`.

        Copies from a GPU are only queued: call `wait_for_copies` after the last one.
        """
        source = tensor.detach()
        buffer = self.take_buffer(key, source)
        if is_accelerator(source.device):
            self._devices.add(source.device)
        buffer.copy_(source, non_blocking=True)
        return buffer

    def take_buffer(self, key: str, like: Tensor) -> Tensor:
        """Memory for a contiguous copy of `like`, which the next copy under `key` may use, too."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = self._buffers[key] = self._make_buffer(like)
        return buffer

    def _make_buffer(self, like: Tensor) -> Tensor:
        if not is_accelerator(like.device):
            return torch.empty(like.shape, dtype=like.dtype)
        contiguous = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return self._arena.make_tensor(contiguous.shape, contiguous.stride(), contiguous.dtype)

    def free(self) -> None:
        """Gives the memory back, when no copy in it is used any longer."""
        self._buffers, self._arena = {}, PinnedArena()

    def wait_for_copies(self) -> None:
        """Waits until all queued copies have finished."""
        for device in self._devices:
            wait_for_stream(device)


def make_snapshot(
    state: TrainingState,
    step: int,
    *,
    generation: int,
    replica: int,
    replicas: int,
    rank: int,
    buffers: HostBuffers,
    has_job_states: bool = False,
) -> RankSnapshot:
    """Copies this rank's share of the stage, and the states that belong to no section.

    `has_job_states`: the states of the whole job are in it though this is not rank 0.
    Raises CheckpointError for state that a checkpoint cannot hold.
    """
    files: list[HostFile] = []
    if entries := list_optimizer_entries(state.optimizers):
        state = replace(state, user={**state.user, OPTIMIZER_ENTRIES: entries})
    rests, named = _split_states(state, has_job_states=has_job_states or rank == 0)
    parts: dict[tuple[int, bool, bool], list[str]] = {}
    share = choose_share(state, replica, replicas)
    buffers.expect_bytes(sum(count_bytes(name, state) for name in share))
    for name in share:
        parts.setdefault((state.section_of[name], name in state.tied, name in state.frozen), []).append(name)
    for (section, tied, frozen), names in parts.items():
        part = f"-d{replica}" if replica else ""
        stem = f"section-{section:05d}-g{generation}{part}{_TIED * tied}{'.frozen' * frozen}"
        files.extend(_section_files(state, section, stem, names=names, buffers=buffers))
        files.extend(_average_and_state_files(state, section, stem, names=names, named=named, buffers=buffers))
    groups: tuple[SavedGroup, ...] = ()
    if replica == 0:
        groups, options = encode_groups(state.optimizers, state.names_by_id, state.schedulers, f"rank{rank}")
        if options:
            files.append(
                _host_file(
                    f"options-g{generation}-r{rank}",
                    FileKind.OPTIONS,
                    -1,
                    holds=(),
                    tensors=options,
                    metadata={},
                    buffers=buffers,
                )
            )
    values = {name: encode_state(rest, f"/user/{name}") for name, rest in rests.items()}
    tensors = {key: tensor for _, of_state in values.values() for key, tensor in of_state.items()}
    file = state_file(generation, rank)
    copied: dict[str, Tensor] = {}
    if tensors:
        files.append(
            _host_file(
                file.removesuffix(_SUFFIX), FileKind.STATE, -1, holds=(), tensors=tensors, metadata={}, buffers=buffers
            )
        )
        copied = files[-1].tensors
    buffers.wait_for_copies()
    held = Counter(state.section_of[name] for name in state.tensors)
    return RankSnapshot(
        step=step,
        section_count=state.section_count,
        seed=state.seed,
        cursor=state.cursor,
        tensors_of={section: held[section] for section in state.sections},
        files=tuple(replace(file, is_frozen=".frozen." in file.name) for file in files),
        groups=groups,
        registered={
            name: RegisteredCopy(
                per=state.user_scopes.get(name, StateScope.AUTO),
                value=value,
                tensors={key: copied[key] for key in of_state},
                file=file if of_state else "",
            )
            for name, (value, of_state) in values.items()
        },
        state_dict=dict(state.state_dict),
    )


def is_tied_file(name: str) -> bool:
    """Whether a file of a section has parameters or buffers that several stages may share."""
    return _TIED in name


def state_file(generation: int, rank: int) -> str:
    """The name of a rank's file of tensors that belong to no section."""
    return f"state-g{generation}{'' if rank == 0 else f'-r{rank}'}{_SUFFIX}"


def _split_states(state: TrainingState, *, has_job_states: bool) -> tuple[dict[str, Any], dict[str, NamedEntries]]:
    """The user's states without their entries for sections, and those entries."""
    rests: dict[str, Any] = {}
    named: dict[str, NamedEntries] = {}
    for name, value in state.user.items():
        per = state.user_scopes.get(name, StateScope.AUTO)
        if per is StateScope.JOB and not has_job_states:
            continue
        if per in (StateScope.AUTO, StateScope.SECTION):
            value, named[name] = split_state(value, state.names)
        rests[name] = value
    return rests, named


def _average_and_state_files(
    state: TrainingState,
    section: int,
    stem: str,
    *,
    names: list[str],
    named: Mapping[str, NamedEntries],
    buffers: HostBuffers,
) -> list[HostFile]:
    """The files of averages, and of the user's states that are keyed by these names."""
    files: list[HostFile] = []
    averages = {name: state.averages[name] for name in names if name in state.averages}
    if averages:
        holds = tuple(averages)
        files.append(
            _host_file(
                f"{stem}.average",
                FileKind.AVERAGE,
                section,
                holds=holds,
                tensors=averages,
                metadata={},
                buffers=buffers,
            )
        )
    content, found = select_entries(named, names, state.names)
    if content:
        encoded, tensors = encode_state(content, "/user")
        metadata = {METADATA_STATE: json.dumps(encoded)}
        holds = tuple(name for name in names if name in found)
        files.append(
            _host_file(
                f"{stem}.registered",
                FileKind.REGISTERED,
                section,
                holds=holds,
                tensors=tensors,
                metadata=metadata,
                buffers=buffers,
            )
        )
    return files


def _section_files(
    state: TrainingState, section: int, stem: str, *, names: list[str], buffers: HostBuffers
) -> list[HostFile]:
    values = {name: state.tensors[name] for name in names}
    files = [
        _host_file(
            f"{stem}.parameters",
            FileKind.PARAMETERS,
            section,
            holds=tuple(names),
            tensors=values,
            metadata={},
            buffers=buffers,
        )
    ]
    by_parameter: dict[str, Any] = {}
    for name in names:
        kept = state.optimizer_state_of(values[name]) if name in state.parameters else None
        if kept is not None:
            by_parameter[name] = kept
    if by_parameter:
        encoded, tensors = encode_state(by_parameter, "")
        metadata = {METADATA_STATE: json.dumps(encoded)}
        holds = tuple(by_parameter)
        files.append(
            _host_file(
                f"{stem}.optimizer",
                FileKind.OPTIMIZER,
                section,
                holds=holds,
                tensors=tensors,
                metadata=metadata,
                buffers=buffers,
            )
        )
    return files


def _host_file(
    stem: str,
    kind: FileKind,
    section: int,
    *,
    holds: tuple[str, ...],
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    buffers: HostBuffers,
) -> HostFile:
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = f"{kind.value}:{name}"
        if tensor.layout is not torch.strided:
            raise CheckpointError(f"{key} is a {tensor.layout} tensor: a checkpoint holds only dense ones")
        copies[name] = buffers.copy_tensor(key, tensor)
    return HostFile(name=f"{stem}{_SUFFIX}", kind=kind, section=section, holds=holds, tensors=copies, metadata=metadata)
