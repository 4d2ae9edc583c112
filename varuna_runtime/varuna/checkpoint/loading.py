"""Loading: any shape reads what any other wrote; everything is verified before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.encoding import decode
from varuna.checkpoint.errors import CheckpointError, MismatchError, StoreError
from varuna.checkpoint.group_options import OptionsByName, options_by_place
from varuna.checkpoint.manifest import MANIFEST, Cursor, FileEntry, FileKind, Manifest, file_generation, parse
from varuna.checkpoint.reading import FileContent, FileReader
from varuna.checkpoint.registered import Resolved, resolve
from varuna.checkpoint.state import (
    TrainingState,
    fill_averages,
    fill_group_options,
    fill_optimizer_states,
    fill_values,
    optimizer_states,
)
from varuna.checkpoint.store import CheckpointStore, folder_of

__all__ = [
    "Loaded",
    "Report",
    "Staged",
    "find_newest",
    "last_generation",
    "load",
    "newest_complete",
    "read_manifest",
    "read_parameters",
    "stage_checkpoint",
]

Report = Callable[[int, str], None]
"""Told the step of a checkpoint that was passed over, and what is wrong with it."""

_log = structlog.get_logger(__name__)


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
    cursor: Cursor | None
    """The samples behind it; None when an earlier version wrote it."""
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
    return find_newest(CheckpointStore(url), before=before, report=report)


def find_newest(
    store: CheckpointStore, *, before: int | None = None, report: Report | None = None, strict: bool = False
) -> int | None:
    """As `newest_complete`. `strict`: a manifest that the store does not hand out raises StoreError."""
    for step in reversed(store.steps()):
        if before is not None and step >= before:
            continue
        try:
            if not store.sizes(step):  # all that is left of a save that failed
                continue
            _complete_manifest(store, step)
        except CheckpointError as error:
            if strict and isinstance(error, StoreError):
                raise
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

    Raises CheckpointError naming the file or tensor at fault, then nothing was changed: MismatchError when the
    checkpoint is not of this model or optimizer, StoreError when it could not be read.
    """
    staged = stage_checkpoint(url, step, state)
    staged.apply()
    return staged.loaded


def read_parameters(url: str, step: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Parameters and buffers by name, in host memory (all of them by default). Raises CheckpointError."""
    store = CheckpointStore(url)
    manifest = _complete_manifest(store, step)
    files = manifest.by_name(FileKind.PARAMETERS)
    wanted = list(files if names is None else names)
    for name in wanted:
        if name not in files:
            raise MismatchError(f"{store.url_of(step)} holds no {name}: it is another model's")
    found: dict[str, Tensor] = {}
    for _, content in FileReader(store, step).contents(files[name] for name in wanted):
        found |= content.tensors
    return {name: found[name] for name in wanted}


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A verified checkpoint, ready to be put into place."""

    loaded: Loaded
    state: TrainingState
    manifest: Manifest
    reader: FileReader
    groups: Sequence[Sequence[Mapping[str, Any]]]
    """The options of each optimizer's parameter groups."""

    def apply(self) -> None:
        """Fills the state, file by file. Raises CheckpointError when a file is no longer what was verified."""
        state, manifest = self.state, self.manifest
        for _, content in self.reader.contents(_files(manifest, FileKind.PARAMETERS, state.tensors)):
            fill_values(state, content.tensors)
        # The average of a parameter that was not averaged when it was saved is its value.
        fill_averages(state, state.parameters)
        for _, content in self.reader.contents(_files(manifest, FileKind.AVERAGE, state.averages)):
            fill_averages(state, content.tensors)
        if not state.optimizers:
            return
        files = manifest.by_name(FileKind.OPTIMIZER)
        fill_optimizer_states(state, dict.fromkeys(name for name in state.parameters if name not in files))
        for entry, content in self.reader.contents(_files(manifest, FileKind.OPTIMIZER, state.parameters)):
            states = optimizer_states(content.metadata, content.tensors)
            held = [name for name in entry.holds if name in state.parameters]
            fill_optimizer_states(state, {name: states[name] for name in held})
        fill_group_options(state, self.groups)


def _files(manifest: Manifest, kind: FileKind, names: Iterable[str]) -> list[FileEntry]:
    """The files of `kind` that hold these names, each once; a name that none holds is left out."""
    by_name = manifest.by_name(kind)
    return list({by_name[name].name: by_name[name] for name in names if name in by_name}.values())


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
    folders = {step: present}
    for entry in manifest.files:
        home = step if entry.in_step is None else entry.in_step
        if home not in folders:
            folders[home] = store.sizes(home)
        file, size = f"{store.url_of(home)}/{entry.name}", folders[home].get(entry.name)
        if size is None:
            raise CheckpointError(f"{file} is missing")
        if size != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes instead of {entry.bytes}")
    return manifest


def stage_checkpoint(url: str, step: int, state: TrainingState) -> Staged:
    """Verifies the checkpoint of `step` for `state`, and changes nothing. Raises as `load` does."""
    store = CheckpointStore(url)
    manifest = _complete_manifest(store, step)
    if not manifest.is_sealed:
        _log.warning("this checkpoint's manifest has no checksum: an earlier version wrote it", step=step)
    where = store.url_of(step)
    _check_names(manifest, state, where)
    reader = FileReader(store, step)
    _check_values(manifest, reader, state)
    _check_averages(manifest, reader, state)
    extra = _decoded_state(manifest, reader)
    by_name = _options_by_name(manifest, reader, state)
    groups: Sequence[Sequence[Mapping[str, Any]]] = ()
    if state.optimizers:
        groups = _groups(manifest, state, by_name, extra.optimizer_groups, where)
        _check_optimizer_states(manifest, reader, state.parameters)
    with _located(where):
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
        cursor=manifest.cursor,
        bytes_read=reader.bytes_read,
        store_bytes=reader.store_bytes,
        options=by_name,
        optimizers=state.optimizers,
    )
    return Staged(loaded=loaded, state=state, manifest=manifest, reader=reader, groups=groups)


def _check_names(manifest: Manifest, state: TrainingState, where: str) -> None:
    """Raises MismatchError unless the checkpoint holds what the model has, and nothing else."""
    held = manifest.by_name(FileKind.PARAMETERS)
    # A parameter that no section uses is in neither checkpoint, though both models have it.
    whole = dict.fromkeys((*state.tensors, *state.state_dict.values()))
    missing = [
        name
        for name in whole
        if name not in held and (name in state.tensors or name not in manifest.state_dict.values())
    ]
    known = {*state.tensors, *state.section_of, *state.state_dict.values()}
    # Without the names of the whole model, what other stages have cannot be told from what is nobody's.
    unknown = [name for name in held if name not in known] if state.state_dict else []
    differences = [
        f"{what} {names[0]}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
        for what, names in (
            ("the model has, and the checkpoint lacks,", missing),
            ("the checkpoint has, and the model lacks,", unknown),
        )
        if names
    ]
    if differences:
        raise MismatchError(f"{where} is another model's: {'; '.join(differences)}")


def _check_values(manifest: Manifest, reader: FileReader, state: TrainingState) -> None:
    reader.verify(_files(manifest, FileKind.PARAMETERS, state.tensors))
    files = manifest.by_name(FileKind.PARAMETERS)
    for name, tensor in state.tensors.items():
        saved = reader.outline(files[name]).tensors.get(name)
        if saved is None:
            raise CheckpointError(f"{reader.url_of(files[name])} does not hold {name}, as it should")
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise MismatchError(
                f"{reader.store.url_of(reader.step)}: {name} is {saved.dtype} {list(saved.shape)} there and "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )


def _check_averages(manifest: Manifest, reader: FileReader, state: TrainingState) -> None:
    reader.verify(_files(manifest, FileKind.AVERAGE, state.averages))
    files = manifest.by_name(FileKind.AVERAGE)
    for name, average in state.averages.items():
        saved = reader.outline(files[name]).tensors.get(name, average) if name in files else average
        if saved.shape != average.shape:
            raise CheckpointError(f"{reader.url_of(files[name])}: the average of {name} has another shape")


def _registered(manifest: Manifest, reader: FileReader, state: TrainingState, job: dict[str, Any]) -> Resolved:
    def read(entry: FileEntry) -> FileContent:
        reader.verify([entry])
        return next(content for _, content in reader.contents([entry]))

    same_shape = (manifest.p, manifest.d) == (state.place.p, state.place.d)
    return resolve(manifest, job, state.names, read, rank=state.place.rank if same_shape else None)


class _Extra(NamedTuple):
    """What a manifest holds besides the tensors of sections."""

    user: dict[str, Any]
    optimizer_groups: list[dict[str, Any]]
    """Rank 0's, from an earlier version."""


def _decoded_state(manifest: Manifest, reader: FileReader) -> _Extra:
    where = reader.store.url_of(reader.step)
    tensors: dict[str, Tensor] = {}
    files = [entry for entry in manifest.files if entry.kind is FileKind.STATE]
    reader.verify(files)
    for _, content in reader.contents(files):
        tensors |= content.tensors
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


def _check_optimizer_states(manifest: Manifest, reader: FileReader, names: Iterable[str]) -> None:
    files = _files(manifest, FileKind.OPTIMIZER, names)
    reader.verify(files)
    for entry in files:
        where = reader.url_of(entry)
        outline = reader.outline(entry)
        with _located(where):
            states = optimizer_states(outline.metadata, outline.tensors)
        for name in entry.holds:
            if not isinstance(states.get(name), dict):
                raise CheckpointError(f"{where} has no state of {name}")


def _options_by_name(manifest: Manifest, reader: FileReader, state: TrainingState) -> OptionsByName:
    entries = [entry for entry in manifest.files if entry.kind is FileKind.OPTIONS]
    reader.verify(entries)
    tensors = {name: tensor for _, content in reader.contents(entries) for name, tensor in content.tensors.items()}
    where = reader.store.url_of(reader.step)
    with _located(where):
        return OptionsByName(manifest.groups, tensors, state.names_by_id, where)


def _groups(
    manifest: Manifest, state: TrainingState, by_name: OptionsByName, of_rank_0: list[dict[str, Any]], where: str
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """The options of each optimizer's groups. Raises MismatchError for optimizers that cannot take them over."""
    if manifest.optimizer is None:
        raise MismatchError(f"{where} holds no optimizer state: load it before the optimizer is set")
    if manifest.groups:
        return by_name.options(state.optimizers)
    return [options_by_place(manifest, of_rank_0, state.optimizers, where)]
