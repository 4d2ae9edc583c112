"""The script's own states in a checkpoint: by section, once for the job, or by rank.

Entries of mappings whose keys are names of the stage's parameters or buffers lie in files of their sections, and come
back to whoever holds those in the new shape. What remains of a state is compared over the ranks: kept once where it is
equal, by rank where it differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from varuna.checkpoint.checksum import Checksum
from varuna.checkpoint.encoding import decode
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.manifest import FileEntry, FileKind, Manifest, Per, RankState, Receipt
from varuna.checkpoint.tensor_file import pieces

__all__ = ["Merged", "Names", "Resolved", "by_section", "digest_of", "join", "merge_registered", "resolve", "split"]

_DEEPEST = 100
"""Levels of nesting that are looked into; the encoding refuses deeper ones."""

_STATE = "state"

Path = tuple[Any, ...]
"""Keys and indices that lead to a mapping inside a state."""

Named = dict[Path, dict[str, Any]]
"""Entries by the path of their mapping."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names by which states may key their entries."""

    held: Mapping[str, Tensor]
    """What this rank holds, by the name under which checkpoints store it."""
    stored: Mapping[str, str]
    """For every name of the whole model: that name."""

    def first(self, key: Any) -> str | None:
        """The stored name of `key`; None when it is no name of the model."""
        if not isinstance(key, str):
            return None
        return key if key in self.held else self.stored.get(key)


def split(value: Any, names: Names) -> tuple[Any, Named]:
    """`value` without the entries that are keyed by names of what this rank holds, and those entries.

    A mapping that also has names of other stages belongs to no section, and stays whole.
    """
    named: Named = {}
    return _split(value, names, (), named), named


def _split(value: Any, names: Names, path: Path, named: Named) -> Any:
    if len(path) > _DEEPEST or isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        known = {key: first for key in value if (first := names.first(key)) is not None}
        if known and all(first in names.held for first in known.values()):
            named[path] = {key: value[key] for key in known}
            value = {key: item for key, item in value.items() if key not in known}
        return {key: _split(item, names, (*path, key), named) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_split(item, names, (*path, index), named) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def join(value: Any, named: Named, path: Path = ()) -> Any:
    """What `split` was given; `named` may have the entries of other ranks."""
    if isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        joined = {key: join(item, named, (*path, key)) for key, item in value.items()}
        return {**joined, **named.get(path, {})}
    if isinstance(value, list | tuple):
        items = [join(item, named, (*path, index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def by_section(named: Mapping[str, Named], wanted: Iterable[str], names: Names) -> tuple[dict[str, Any], set[str]]:
    """The entries of `wanted` stored names, by state, as a file of theirs holds them; and those that have some."""
    of = set(wanted)
    content: dict[str, Any] = {}
    found: set[str] = set()
    for state, mappings in named.items():
        parts = []
        for path, entries in mappings.items():
            mine = {key: value for key, value in entries.items() if names.first(key) in of}
            found |= {str(names.first(key)) for key in mine}
            if mine:
                parts.append([list(path), mine])
        if parts:
            content[state] = parts
    return content, found


def digest_of(value: Any, tensors: Mapping[str, Tensor]) -> str:
    """A checksum of an encoded state and its tensors, in host memory."""
    checksum = Checksum()
    checksum.update(json.dumps(value, sort_keys=True).encode())
    for piece in pieces(dict(tensors), {}):
        checksum.update(piece)
    return str(checksum)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What the ranks' copies of the registered states came to."""

    job: dict[str, Any]
    """Kept once, encoded."""
    by_rank: dict[str, tuple[RankState, ...]]
    """Those that differ."""
    job_files: set[str] = field(default_factory=set)
    """Files that every rank reads for `job`."""

    def keep(self, files: Iterable[FileEntry], always: str) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
        """The files of the checkpoint, and the names of those that nobody needs. `always`: the first rank's."""
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


def merge_registered(receipts: Iterable[Receipt]) -> Merged:
    """Compares what the ranks wrote. Raises CheckpointError for ranks that contradict each other."""
    copies: dict[str, list[RankState]] = {}
    for receipt in receipts:
        for name, state in receipt.registered.items():
            copies.setdefault(name, []).append(state)
    merged = Merged(job={}, by_rank={})
    for name, states in copies.items():
        first = states[0]
        for other in states:
            if other.per is not first.per:
                raise CheckpointError(
                    f"the registered state {name!r} is per={first.per.value!r} on rank {first.ranks[0]} and "
                    f"per={other.per.value!r} on rank {other.ranks[0]}: register it alike on all ranks"
                )
        groups = _equal_ones(states)
        if len(groups) == 1 and first.per is not Per.RANK:
            merged.job[name] = first.value
            merged.job_files.update({first.file} - {""})
        elif first.per is Per.SECTION:
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
class Resolved:
    """The registered states for one rank."""

    states: dict[str, Any]
    rank_0s: frozenset[str] = frozenset()
    """Those that differed between ranks of another shape: what stands in `states` is the first rank's."""


def resolve(
    manifest: Manifest,
    job: Mapping[str, Any],
    names: Names,
    content: Callable[[FileEntry], tuple[Mapping[str, Tensor], Mapping[str, str]]],
    *,
    rank: int | None,
) -> Resolved:
    """What a rank gets. `job`: the states kept once, decoded. `rank`: None in another shape than the one that wrote."""
    states = dict(job)
    rank_0s: set[str] = set()
    files = {entry.name: entry for entry in manifest.files}
    for name, copies in manifest.rank_states.items():
        chosen = copies[0] if rank is None else next((copy for copy in copies if rank in copy.ranks), None)
        if rank is None:
            rank_0s.add(name)
        if chosen is not None:
            states[name] = decode(chosen.value, content(files[chosen.file])[0] if chosen.file else {})
    for name, named in _named_entries(manifest, names, content).items():
        if name in states:
            states[name] = join(states[name], named)
    return Resolved(states=states, rank_0s=frozenset(rank_0s))


def _named_entries(
    manifest: Manifest,
    names: Names,
    content: Callable[[FileEntry], tuple[Mapping[str, Tensor], Mapping[str, str]]],
) -> dict[str, Named]:
    """Of what this rank holds, in the order of its parameters, which scripts may rely on."""
    files = manifest.by_name(FileKind.REGISTERED)
    held = [name for name in names.held if name in files]
    read: dict[str, Any] = {}
    found: dict[str, Named] = {}
    for stored in held:
        entry = files[stored]
        if entry.name not in read:
            tensors, metadata = content(entry)
            read[entry.name] = decode(json.loads(metadata.get(_STATE, "{}")), tensors)
        for state, parts in read[entry.name].items():
            for path, entries in parts:
                mine = {key: value for key, value in entries.items() if names.first(key) == stored}
                if mine:
                    found.setdefault(state, {}).setdefault(tuple(path), {}).update(mine)
    return found
