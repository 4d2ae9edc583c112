"""Loading: any shape reads what any other wrote; everything is verified before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import structlog
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint import tensor_file
from varuna.checkpoint.encoding import decode
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.group_options import OptionsByName, options_by_place
from varuna.checkpoint.manifest import MANIFEST, FileEntry, FileKind, Manifest, file_generation, parse
from varuna.checkpoint.registered import Resolved, resolve
from varuna.checkpoint.state import TrainingState, fill, optimizer_states
from varuna.checkpoint.store import CheckpointStore, folder_of

if TYPE_CHECKING:
    from varuna.launch import KeyValueStore

__all__ = [
    "Loaded",
    "Report",
    "last_generation",
    "load",
    "newest_complete",
    "read_manifest",
    "read_parameters",
    "resume",
]

Report = Callable[[int, str], None]
"""Told the step of a checkpoint that was passed over, and what is wrong with it."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_KEY = "varuna.resume"
_READERS = 4


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What came from a checkpoint besides the tensors."""

    step: int
    generation: int
    user: dict[str, Any]
    """The script's states, as this rank is to have them."""
    rank_0s: frozenset[str] = frozenset()
    """Of them, those that differed between ranks of another shape: what stands in `user` is rank 0's."""
    p: int
    d: int
    """The shape that wrote it."""
    averaged: bool = False
    """Whether it holds moving averages of the parameters."""
    seed: int
    bytes_read: int
    store_bytes: int
    """Of them, those that came from the store: the others' copies were on this VM."""
    options: OptionsByName
    """Of parameter groups, with what LR schedulers have for them."""
    optimizers: Sequence[Optimizer] = ()
    """Those that the state was loaded into."""

    def scheduler_state(self, name: str, scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state`, saved under `name`, for this rank's scheduler: its lists have what was saved for this rank's groups.

        Raises CheckpointError when the groups cannot take over what was saved.
        """
        return self.options.scheduler_state(name, scheduler, state, self.optimizers)


def newest_complete(url: str, *, before: int | None = None, report: Report | None = None) -> int | None:
    """The newest step (below `before`, if given) whose checkpoint is whole: manifest, files, sizes. None: no such.

    The files' checksums are `load`'s to verify. Raises CheckpointError when the store cannot be listed.
    """
    store = CheckpointStore(url)
    for step in reversed(store.steps()):
        if before is not None and step >= before:
            continue
        try:
            if not store.sizes(step):  # all that is left of a save that failed
                continue
            _complete_manifest(store, step)
        except CheckpointError as error:
            if report is not None:
                report(step, str(error))
            continue
        return step
    return None


def last_generation(url: str) -> int:
    """The highest generation that has written to the store, whole checkpoints or not; 0: none has."""
    store = CheckpointStore(url)
    written = (file_generation(name) or 0 for step in store.steps() for name in store.sizes(step))
    return max(written, default=0)


def read_manifest(url: str, step: int) -> Manifest:
    """The manifest of a complete checkpoint. Raises CheckpointError saying what is wrong or missing."""
    return _complete_manifest(CheckpointStore(url), step)


def load(url: str, step: int, state: TrainingState) -> Loaded:
    """Fill `state` from the checkpoint of `step`, reading only files that hold its tensors.

    Raises CheckpointError naming the file or tensor at fault; then nothing was changed.
    """
    staged = _stage(url, step, state)
    staged.apply()
    return staged.loaded


def resume(
    url: str,
    state: TrainingState,
    *,
    store: KeyValueStore | None = None,
    rank: int = 0,
    world_size: int = 1,
    committed_step: int = 0,
    report: Report | None = None,
) -> Loaded | None:
    """Fill every rank's `state` from the newest checkpoint that all ranks can read; None: start from nothing.

    Rank 0 proposes, all ranks verify their part, and only when all could does any of them change its state; else rank 0
    proposes the one before. `store` is the generation's rendezvous store, needed when there are other ranks. `report`
    is told on rank 0.

    `committed_step`: of the newest checkpoint that is known to have been there; 0: none is. Raises CheckpointError on
    every rank when there was one, and now none can be read; and on rank 0 when the store cannot be listed.
    """
    if world_size > 1 and store is None:
        raise ValueError(f"rank {rank} of {world_size} needs the rendezvous store to agree with the others")
    passed_over: list[str] = []

    def note(step: int, fault: str) -> None:
        passed_over.append(fault)
        if report is not None:
            report(step, fault)

    before: int | None = None
    attempt = 0
    # Ranks count their calls, so that a second one does not read what the first agreed on.
    call = 1 if store is None else store.add(f"{_KEY}/calls/{rank}", 1)
    while True:
        prefix = f"{_KEY}/{call}/{attempt}"
        step = newest_complete(url, before=before, report=note) if rank == 0 else None
        step = _from_rank_0(store, f"{prefix}/step", step, rank)
        if step is None:
            if committed_step:
                lost = _lost(url, committed_step, passed_over) if rank == 0 else ""
                raise CheckpointError(_from_rank_0(store, f"{prefix}/lost", lost, rank))
            return None
        staged, fault = _try_stage(url, step, state)
        faults = _agree(store, prefix, fault, rank, world_size)
        if not faults and staged is not None:
            staged.apply()
            return staged.loaded
        if rank == 0:
            note(step, "; ".join(faults))
        before, attempt = step, attempt + 1


def _lost(url: str, committed_step: int, passed_over: list[str]) -> str:
    found = f"none there can be read; the newest: {passed_over[0]}" if passed_over else "none is there"
    return (
        f"step {committed_step} was saved at {CheckpointStore(url).url}, and {found}. Bring the checkpoints back and "
        "retry the job, or submit it with checkpoint.may_start_over to train from step 0 again"
    )


def read_parameters(url: str, step: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Parameters and buffers by name, in host memory (all of them by default). Raises CheckpointError."""
    store = CheckpointStore(url)
    manifest = _complete_manifest(store, step)
    reader = _Reader(store, step)
    return _values(manifest, reader, manifest.by_name(FileKind.PARAMETERS) if names is None else names)


@dataclass(frozen=True)
class _Staged:
    """A verified checkpoint in memory, ready to be put into place."""

    loaded: Loaded
    state: TrainingState
    values: Mapping[str, Tensor]
    averages: Mapping[str, Tensor]
    optimizer_state: Mapping[str, dict[str, Any]]
    groups: Sequence[Sequence[Mapping[str, Any]]]

    def apply(self) -> None:
        fill(self.state, self.values, self.optimizer_state, self.groups)
        with torch.no_grad():
            for name, average in self.averages.items():
                self.state.averages[name].copy_(average)


def _complete_manifest(store: CheckpointStore, step: int) -> Manifest:
    where = store.url_of(step)
    present = store.sizes(step)
    if not present:
        raise CheckpointError(f"{where} does not exist")
    data = store.get(f"{folder_of(step)}/{MANIFEST}")
    if data is None:
        raise CheckpointError(f"{where} has no {MANIFEST}: its writing was interrupted")
    manifest = parse(Manifest, data, f"{where}/{MANIFEST}")
    if manifest.step != step:
        raise CheckpointError(f"{where}/{MANIFEST} is of step {manifest.step}")
    for entry in manifest.files:
        if entry.name not in present:
            raise CheckpointError(f"{where}/{entry.name} is missing")
        if present[entry.name] != entry.bytes:
            raise CheckpointError(f"{where}/{entry.name} has {present[entry.name]} bytes instead of {entry.bytes}")
    return manifest


def _stage(url: str, step: int, state: TrainingState) -> _Staged:
    store = CheckpointStore(url)
    manifest = _complete_manifest(store, step)
    if not manifest.is_sealed:
        _log.warning("this checkpoint's manifest has no checksum: an earlier version wrote it", step=step)
    reader = _Reader(store, step)
    values = _values(manifest, reader, state.tensors)
    for name, tensor in state.tensors.items():
        saved = values[name]
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise CheckpointError(
                f"{store.url_of(step)}: {name} is {saved.dtype} {list(saved.shape)} there and "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )
    extra = _decoded_state(manifest, reader)
    by_name = _options_by_name(manifest, reader, state)
    optimizer_state: dict[str, dict[str, Any]] = {}
    groups: Sequence[Sequence[Mapping[str, Any]]] = ()
    if state.optimizers:
        groups = _groups(manifest, state, by_name, extra.optimizer_groups, store.url_of(step))
        optimizer_state = _optimizer_state(manifest, reader, state.parameters)
    averages = _averages(manifest, reader, state, values)
    with _located(store.url_of(step)):
        resolved = _registered(manifest, reader, state, extra.user)
    if reader.faults:
        _log.info("read from the store, not the local copies", files=len(reader.faults), first=reader.faults[0])
    loaded = Loaded(
        step=step,
        generation=manifest.generation,
        user=resolved.states,
        rank_0s=resolved.rank_0s,
        p=manifest.p,
        d=manifest.d,
        averaged=bool(manifest.by_name(FileKind.AVERAGE)),
        seed=manifest.seed,
        bytes_read=reader.bytes_read,
        store_bytes=reader.store_bytes,
        options=by_name,
        optimizers=state.optimizers,
    )
    return _Staged(loaded, state, values, averages, optimizer_state, groups)


def _registered(manifest: Manifest, reader: _Reader, state: TrainingState, job: dict[str, Any]) -> Resolved:
    same_shape = (manifest.p, manifest.d) == (state.place.p, state.place.d)
    return resolve(manifest, job, state.names, reader.tensors, rank=state.place.rank if same_shape else None)


def _averages(
    manifest: Manifest, reader: _Reader, state: TrainingState, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of the parameters that are averaged now; of one that was not when it was saved, its value."""
    files = manifest.by_name(FileKind.AVERAGE)
    averages = {name: _tensor(reader, files[name], name) if name in files else values[name] for name in state.averages}
    for name, average in averages.items():
        if average.shape != state.averages[name].shape:
            raise CheckpointError(f"{reader.store.url_of(reader.step)}: the average of {name} has another shape")
    return averages


def _try_stage(url: str, step: int, state: TrainingState) -> tuple[_Staged | None, str]:
    try:
        return _stage(url, step, state), ""
    except CheckpointError as error:
        return None, str(error)


_Content = tuple[dict[str, Tensor], dict[str, str]]
"""The tensors and the metadata of a file."""


@dataclass
class _Reader:
    """Reads and verifies files of one checkpoint, each once: the copy on this VM, if there is one, else the store's."""

    store: CheckpointStore
    step: int
    bytes_read: int = 0
    store_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    """What is wrong with copies that should have been on this VM."""
    _read: dict[str, _Content] = field(default_factory=dict)

    def tensors(self, entry: FileEntry) -> _Content:
        self.fetch([entry])
        return self._read[entry.name]

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        """Reads and verifies files side by side."""
        wanted = list({entry.name: entry for entry in entries if entry.name not in self._read}.values())
        if not wanted:
            return
        with ThreadPoolExecutor(min(_READERS, len(wanted)), thread_name_prefix="checkpoint-read") as pool:
            for entry, (content, fault) in zip(wanted, pool.map(self._content, wanted), strict=True):
                self._read[entry.name] = content
                self.bytes_read += entry.bytes
                if not entry.local or fault:
                    self.store_bytes += entry.bytes
                self.faults += [fault] if fault else []

    def _content(self, entry: FileEntry) -> tuple[_Content, str]:
        """And why it is not from the copy that this VM should have; empty when it is, or there is none."""
        if not entry.local:
            return self._verified(self.store, entry), ""
        try:
            return self._verified(CheckpointStore(entry.local), entry), ""
        except (CheckpointError, ValueError) as error:  # a ValueError: it is no URL of a store
            return self._verified(self.store, entry), str(error)

    def _verified(self, store: CheckpointStore, entry: FileEntry) -> _Content:
        path = f"{folder_of(self.step)}/{entry.name}"
        found = store.read(path, entry.bytes)
        if found is None:
            raise CheckpointError(f"{store.url}/{path} is missing, or not of {entry.bytes} bytes")
        data, checksum = found
        if checksum != entry.checksum:
            raise CheckpointError(
                f"{store.url}/{path} is corrupt: its checksum is {checksum} instead of {entry.checksum}"
            )
        try:
            return tensor_file.read(data)
        except ValueError as error:
            raise CheckpointError(f"{store.url}/{path} is not a safetensors file: {error}") from error


def _values(manifest: Manifest, reader: _Reader, names: Iterable[str]) -> dict[str, Tensor]:
    files = manifest.by_name(FileKind.PARAMETERS)
    names = list(names)
    for name in names:
        if name not in files:
            raise CheckpointError(f"{reader.store.url_of(reader.step)} holds no {name}: it is another model's")
    reader.fetch(files[name] for name in names)
    return {name: _tensor(reader, files[name], name) for name in names}


def _tensor(reader: _Reader, entry: FileEntry, name: str) -> Tensor:
    tensors, _ = reader.tensors(entry)
    if name not in tensors:
        raise CheckpointError(f"{reader.store.url_of(reader.step)}/{entry.name} does not hold {name}, as it should")
    return tensors[name]


class _Extra(NamedTuple):
    """What a manifest holds besides the tensors of sections."""

    user: dict[str, Any]
    optimizer_groups: list[dict[str, Any]]
    """Rank 0's, from an earlier version."""


def _decoded_state(manifest: Manifest, reader: _Reader) -> _Extra:
    where = reader.store.url_of(reader.step)
    tensors: dict[str, Tensor] = {}
    for entry in manifest.files:
        if entry.kind is FileKind.STATE:
            tensors |= reader.tensors(entry)[0]
    with _located(where):
        decoded = decode(manifest.state, tensors)
    if not isinstance(decoded, dict):
        raise CheckpointError(f"{where}/{MANIFEST}: field state is no mapping")
    user, groups = decoded.get("user"), decoded.get("optimizer_groups", [])
    if not isinstance(user, dict):
        raise CheckpointError(f"{where}/{MANIFEST}: field state.user is no mapping")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{where}/{MANIFEST}: field state.optimizer_groups is no list of mappings")
    return _Extra(user, groups)


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Says where the checkpoint lies in which something was found to be wrong."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _optimizer_state(manifest: Manifest, reader: _Reader, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    files = manifest.by_name(FileKind.OPTIMIZER)
    states: dict[str, dict[str, Any]] = {}
    names = [name for name in names if name in files]
    reader.fetch(files[name] for name in names)
    for name in names:
        if name not in states:
            tensors, metadata = reader.tensors(files[name])
            with _located(f"{reader.store.url_of(reader.step)}/{files[name].name}"):
                states |= optimizer_states(metadata, tensors)
            if not isinstance(states.get(name), dict):
                raise CheckpointError(f"{reader.store.url_of(reader.step)}/{files[name].name} has no state of {name}")
    return states


def _options_by_name(manifest: Manifest, reader: _Reader, state: TrainingState) -> OptionsByName:
    entries = [entry for entry in manifest.files if entry.kind is FileKind.OPTIONS]
    reader.fetch(entries)
    tensors = {name: tensor for entry in entries for name, tensor in reader.tensors(entry)[0].items()}
    where = reader.store.url_of(reader.step)
    with _located(where):
        return OptionsByName(manifest.groups, tensors, state.names_by_id, where)


def _groups(
    manifest: Manifest, state: TrainingState, by_name: OptionsByName, of_rank_0: list[dict[str, Any]], where: str
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """The options of each optimizer's groups. Raises CheckpointError for optimizers that cannot take them over."""
    if manifest.optimizer is None:
        raise CheckpointError(f"{where} holds no optimizer state: load it before the optimizer is set")
    if manifest.groups:
        return by_name.options(state.optimizers)
    return [options_by_place(manifest, of_rank_0, state.optimizers, where)]


def _from_rank_0(store: KeyValueStore | None, key: str, value: T, rank: int) -> T:
    if store is None:
        return value
    if rank == 0:
        store.set(key, json.dumps(value))
    agreed: T = json.loads(store.get(key))
    return agreed


def _agree(store: KeyValueStore | None, prefix: str, fault: str, rank: int, world_size: int) -> list[str]:
    """The faults of all ranks, the same list on every rank."""
    if store is None:
        return [fault] if fault else []
    store.set(f"{prefix}/rank{rank}", json.dumps(fault))
    if rank == 0:
        all_faults = [json.loads(store.get(f"{prefix}/rank{other}")) for other in range(world_size)]
        store.set(f"{prefix}/faults", json.dumps([text for text in all_faults if text]))
    agreed: list[str] = json.loads(store.get(f"{prefix}/faults"))
    return agreed
