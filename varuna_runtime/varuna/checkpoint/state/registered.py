"""The script's own states in a checkpoint: by section, once for the job, or by rank.

Entries of mappings whose keys are names of the stage's parameters or buffers lie in files of their sections, and are
loaded by the ranks that hold these in the new shape. The rest of a state is compared over the ranks: saved once if it
is equal, by rank if it differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.checksum import Checksum
from varuna.checkpoint.format.encoding import decode_state
from varuna.checkpoint.format.manifest import FileEntry, FileKind, Manifest, RankState, Receipt, StateScope
from varuna.checkpoint.format.tensor_file import iterate_pieces

__all__ = [
    "MergedStates",
    "ResolvedStates",
    "TensorNames",
    "digest_of",
    "join_state",
    "merge_registered",
    "resolve_states",
    "select_entries",
    "split_state",
]

_DEEPEST = 100
"""Levels of nesting that are searched; the encoding refuses deeper ones."""

_STATE = "state"

Path = tuple[Any, ...]
"""Keys and indices that lead to a mapping inside a state."""

NamedEntries = dict[Path, dict[str, Any]]
"""Entries by the path of their mapping."""


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """The names by which states may key their entries."""

    held: Mapping[str, Tensor]
    """This rank's tensors, by the name under which checkpoints store them."""
    stored: Mapping[str, str]
    """For every name of the whole model: the name under which checkpoints store it."""

    def stored_name(self, key: Any) -> str | None:
        """The stored name of `key`; None if the model has no such name."""
        if not isinstance(key, str):
            return None
        return key if key in self.held else self.stored.get(key)


def split_state(value: Any, names: TensorNames) -> tuple[Any, NamedEntries]:
    """`value` without the entries keyed by names of this rank's tensors, and those entries.

    A mapping that also has names of other stages belongs to no section, and stays whole.
    """
    named: NamedEntries = {}
    return _split(value, names, (), named), named


def _split(value: Any, names: TensorNames, path: Path, named: NamedEntries) -> Any:
    if len(path) > _DEEPEST or isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        known = {key: first for key in value if (first := names.stored_name(key)) is not None}
        if known and all(first in names.held for first in known.values()):
            named[path] = {key: value[key] for key in known}
            value = {key: item for key, item in value.items() if key not in known}
        return {key: _split(item, names, (*path, key), named) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_split(item, names, (*path, index), named) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def join_state(value: Any, named: NamedEntries, path: Path = ()) -> Any:
    """The inverse of `split_state`; `named` may have the entries of other ranks."""
    if isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        joined = {key: join_state(item, named, (*path, key)) for key, item in value.items()}
        return {**joined, **named.get(path, {})}
    if isinstance(value, list | tuple):
        items = [join_state(item, named, (*path, index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def select_entries(
    named: Mapping[str, NamedEntries], wanted: Iterable[str], names: TensorNames
) -> tuple[dict[str, Any], set[str]]:
    """The entries of the `wanted` stored names, by state, as their file holds them; and the names with entries."""
    of = set(wanted)
    content: dict[str, Any] = {}
    found: set[str] = set()
    for state, mappings in named.items():
        parts = []
        for path, entries in mappings.items():
            mine = {key: value for key, value in entries.items() if names.stored_name(key) in of}
            found |= {str(names.stored_name(key)) for key in mine}
            if mine:
                parts.append([list(path), mine])
        if parts:
            content[state] = parts
    return content, found


def digest_of(value: Any, tensors: Mapping[str, Tensor]) -> str:
    """A checksum of an encoded state and its tensors, in host memory."""
    checksum = Checksum()
    checksum.update(json.dumps(value, sort_keys=True).encode())
    for piece in iterate_pieces(dict(tensors), {}):
        checksum.update(piece)
    return str(checksum)


@dataclass(frozen=True, kw_only=True)
class MergedStates:
    """The registered states, merged from the ranks' copies."""

    job: dict[str, Any]
    """States saved once, encoded."""
    by_rank: dict[str, tuple[RankState, ...]]
    """States that differ between ranks."""
    job_files: set[str] = field(default_factory=set)
    """Files that every rank reads for `job`."""

    def select_files(self, files: Iterable[FileEntry], always: str) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
        """The files of the checkpoint, and the names of those that no rank needs. `always`: the first rank's file."""
        needed = {copy.file for copies in self.by_rank.values() for copy in copies}
        kept: list[FileEntry] = []
        dropped: list[str] = []
        for entry in files:
            if entry.kind is not FileKind.STATE or entry.name == always or entry.name in self.job_files:
                kept.append(entry)
            elif entry.name in needed:
                kept.append(entry.model_copy(update={"kind": FileKind.RANK_STATE}))
            else:
                dropped.append(entry.name)
        return tuple(kept), tuple(dropped)


def merge_registered(receipts: Iterable[Receipt]) -> MergedStates:
    """Compares the ranks' states. Raises CheckpointError for ranks that contradict each other."""
    copies: dict[str, list[RankState]] = {}
    for receipt in receipts:
        for name, state in receipt.registered.items():
            copies.setdefault(name, []).append(state)
    merged = MergedStates(job={}, by_rank={})
    for name, states in copies.items():
        first = states[0]
        for other in states:
            if other.per is not first.per:
                raise CheckpointError(
                    f"the registered state {name!r} is per={first.per.value!r} on rank {first.ranks[0]} and "
                    f"per={other.per.value!r} on rank {other.ranks[0]}: register it alike on all ranks"
                )
        groups = _equal_ones(states)
        if len(groups) == 1 and first.per is not StateScope.RANK:
            merged.job[name] = first.value
            merged.job_files.update({first.file} - {""})
        elif first.per is StateScope.SECTION:
            other = groups[1]
            raise CheckpointError(
                f"the registered state {name!r} is per='section', and rank {other.ranks[0]} has other values than rank "
                f"{first.ranks[0]} outside of what is keyed by names of parameters: key all that differs by such names"
            )
        else:
            merged.by_rank[name] = groups
    return merged


def _equal_ones(states: Iterable[RankState]) -> tuple[RankState, ...]:
    groups: dict[str, RankState] = {}
    for state in states:
        same = groups.get(state.digest)
        groups[state.digest] = state if same is None else same.model_copy(update={"ranks": (*same.ranks, *state.ranks)})
    return tuple(groups.values())


@dataclass(frozen=True, kw_only=True)
class ResolvedStates:
    """The registered states for one rank."""

    states: dict[str, Any]
    rank_0s: frozenset[str] = frozenset()
    """Names of states that differed between ranks of another shape, so that `states` has the first rank's."""


def resolve_states(
    manifest: Manifest,
    job: Mapping[str, Any],
    names: TensorNames,
    content: Callable[[FileEntry], tuple[Mapping[str, Tensor], Mapping[str, str]]],
    *,
    rank: int | None,
) -> ResolvedStates:
    """A rank's states. `job`: the states saved once, decoded. `rank`: None if another shape wrote the checkpoint."""
    states = dict(job)
    rank_0s: set[str] = set()
    files = {entry.name: entry for entry in manifest.files}
    for name, copies in manifest.rank_states.items():
        chosen = copies[0] if rank is None else next((copy for copy in copies if rank in copy.ranks), None)
        if rank is None:
            rank_0s.add(name)
        if chosen is not None:
            states[name] = decode_state(chosen.value, content(files[chosen.file])[0] if chosen.file else {})
    for name, named in _named_entries(manifest, names, content).items():
        if name in states:
            states[name] = join_state(states[name], named)
    return ResolvedStates(states=states, rank_0s=frozenset(rank_0s))


def _named_entries(
    manifest: Manifest,
    names: TensorNames,
    content: Callable[[FileEntry], tuple[Mapping[str, Tensor], Mapping[str, str]]],
) -> dict[str, NamedEntries]:
    """The entries of this rank's tensors, in the order of its parameters, which scripts may rely on."""
    files = manifest.files_by_name(FileKind.REGISTERED)
    held = [name for name in names.held if name in files]
    read: dict[str, Any] = {}
    found: dict[str, NamedEntries] = {}
    for stored in held:
        entry = files[stored]
        if entry.name not in read:
            tensors, metadata = content(entry)
            read[entry.name] = decode_state(json.loads(metadata.get(_STATE, "{}")), tensors)
        for state, parts in read[entry.name].items():
            for path, entries in parts:
                mine = {key: value for key, value in entries.items() if names.stored_name(key) == stored}
                if mine:
                    found.setdefault(state, {}).setdefault(tuple(path), {}).update(mine)
    return found
