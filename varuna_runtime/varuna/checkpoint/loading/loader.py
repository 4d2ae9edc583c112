"""Loading: any shape reads what any other wrote, and verifies everything before it changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import structlog
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.errors import CheckpointError, MismatchError
from varuna.checkpoint.format.encoding import decode_state
from varuna.checkpoint.format.manifest import (
    MANIFEST,
    FileEntry,
    FileKind,
    Manifest,
    SampleCursor,
)
from varuna.checkpoint.loading.complete_checkpoints import open_to_load, read_complete_manifest
from varuna.checkpoint.loading.reader import ContentReader, FileContent, FileReader
from varuna.checkpoint.loading.verification import (
    check_averages,
    check_names,
    check_optimizer_states,
    check_values,
    files_holding,
    located_errors,
)
from varuna.checkpoint.state.group_options import OptionsByName, options_by_place
from varuna.checkpoint.state.rank_state import (
    OPTIMIZER_ENTRIES,
    OptimizerEntries,
    TrainingState,
    fill_averages,
    fill_group_options,
    fill_optimizer_entries,
    fill_optimizer_states,
    fill_values,
    optimizer_states,
)
from varuna.checkpoint.state.registered import ResolvedStates, resolve_states

__all__ = [
    "LoadedCheckpoint",
    "StagedCheckpoint",
    "list_for_update",
    "load_checkpoint",
    "read_parameters",
    "stage_checkpoint",
    "stage_state",
]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What a checkpoint gave besides the tensors."""

    step: int
    generation: int
    user: dict[str, Any]
    """The script's states for this rank."""
    rank_0s: frozenset[str] = frozenset()
    """Names in `user` whose values differed between ranks of another shape, so that `user` has rank 0's."""
    p: int
    d: int
    """The shape that wrote it."""
    averaged: bool = False
    """Whether it holds moving averages of the parameters."""
    seed: int
    cursor: SampleCursor | None
    """Its position in the samples; None when an earlier version wrote it."""
    bytes_read: int
    store_bytes: int
    """Bytes of them that came from the store."""
    peer_bytes: int = 0
    """Bytes of them that came from the memories of other processes. What came from neither came from copies on this VM.
    """
    options: OptionsByName
    """Options of the parameter groups, with the LR schedulers' values for them."""
    optimizers: Sequence[Optimizer] = ()
    """The optimizers that the state was loaded into."""

    def scheduler_state(self, name: str, scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state`, saved under `name`, for this rank's scheduler: its lists get the values of this rank's groups.

        Raises CheckpointError when the groups cannot take over what was saved.
        """
        return self.options.scheduler_state(name, scheduler, state, self.optimizers)


def load_checkpoint(url: str, step: int, state: TrainingState) -> LoadedCheckpoint:
    """Fill `state` from the checkpoint of `step`, reading only files that hold its tensors.

    Raises CheckpointError naming the file or tensor at fault: MismatchError when the checkpoint is of another model or
    optimizer, StoreError when it could not be read. Nothing is changed then before `state.before_load` has been called.
    """
    return stage_checkpoint(url, step, state).fill_state()


def read_parameters(url: str, step: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Parameters and buffers by name, in host memory (all of them by default). Raises CheckpointError."""
    store = open_to_load(url)
    manifest = read_complete_manifest(store, step)
    files = manifest.files_by_name(FileKind.PARAMETERS)
    wanted = list(files if names is None else names)
    for name in wanted:
        if name not in files:
            raise MismatchError(f"{store.url_of(step)} holds no {name}: it is another model's")
    found: dict[str, Tensor] = {}
    for _, content in FileReader(store, step).read_contents(files[name] for name in wanted):
        found |= content.tensors
    return {name: found[name] for name in wanted}


@dataclass(frozen=True, kw_only=True)
class StagedCheckpoint:
    """A verified checkpoint, or the state that other processes hold, ready to be loaded into this rank's."""

    loaded: LoadedCheckpoint
    """Its counts of bytes are those of what was read to stage it: `count_loaded` has them all."""
    state: TrainingState
    manifest: Manifest
    reader: ContentReader
    groups: Sequence[Sequence[Mapping[str, Any]]]
    """The options of each optimizer's parameter groups."""
    entries: OptimizerEntries

    def fill_state(self) -> LoadedCheckpoint:
        """Fills the state, file by file. Raises CheckpointError when a file has changed since it was verified."""
        self.fill_values()
        self.fill_for_update(self.read_for_update())
        return self.count_loaded()

    def count_loaded(self) -> LoadedCheckpoint:
        """`loaded`, with the bytes that have been read so far."""
        reader = self.reader
        return replace(
            self.loaded, bytes_read=reader.bytes_read, store_bytes=reader.store_bytes, peer_bytes=reader.peer_bytes
        )

    def fill_values(self) -> None:
        """Fills what a pass reads: parameters and buffers; and the options of the optimizers' groups."""
        state = self.state
        state.before_load()
        for _, content in self.reader.read_contents(files_holding(self.manifest, FileKind.PARAMETERS, state.tensors)):
            fill_values(state, content.tensors)
        if state.optimizers:
            fill_group_options(state, self.groups)

    def read_for_update(self) -> Iterator[tuple[FileEntry, FileContent]]:
        """The files of `list_for_update`, from any thread, while nothing else reads."""
        return self.reader.read_contents(list_for_update(self.manifest, self.state))

    def fill_for_update(self, files: Iterable[tuple[FileEntry, FileContent]]) -> None:
        """Fills what only an update reads from the `files` of `read_for_update`."""
        state, held = self.state, self.manifest.files_by_name(FileKind.OPTIMIZER)
        # A parameter that was saved without an average starts its average at its value.
        fill_averages(state, state.parameters)
        if state.optimizers:
            fill_optimizer_entries(state.optimizers, self.entries)
            without = dict.fromkeys(name for name in state.parameters if name not in held)
            fill_optimizer_states(state, without, self.loaded.options)
        for entry, content in files:
            if entry.kind is FileKind.AVERAGE:
                fill_averages(state, content.tensors)
                continue
            states = optimizer_states(content.metadata, content.tensors)
            own = {name: states[name] for name in entry.holds if name in state.parameters}
            fill_optimizer_states(state, own, self.loaded.options)


def list_for_update(manifest: Manifest, state: TrainingState) -> list[FileEntry]:
    """The files of what only an update reads: moving averages, and the optimizers' state of each parameter."""
    # Also of what does not train in this process yet: the script may have begun to train it later.
    averaged = state.averages if state.start_averages is None else state.parameters
    averages = files_holding(manifest, FileKind.AVERAGE, averaged)
    return [*averages, *(files_holding(manifest, FileKind.OPTIMIZER, state.parameters) if state.optimizers else ())]


def stage_checkpoint(url: str, step: int, state: TrainingState) -> StagedCheckpoint:
    """Verifies the checkpoint of `step` for `state`, and changes nothing. Raises as `load_checkpoint` does."""
    store = open_to_load(url)
    manifest = read_complete_manifest(store, step)
    if not manifest.is_sealed:
        _log.warning("this checkpoint's manifest has no checksum: an earlier version wrote it", step=step)
    reader = FileReader(store, step)
    staged = stage_state(manifest, reader, state)
    if reader.faults:
        _log.info("read from the store, not the local copies", files=len(reader.faults), first=reader.faults[0])
    return staged


def stage_state(manifest: Manifest, reader: ContentReader, state: TrainingState) -> StagedCheckpoint:
    """As `stage_checkpoint`, for the files of `manifest` that `reader` reads."""
    where = reader.where
    check_names(manifest, state, where)
    check_values(manifest, reader, state)
    if state.start_averages is not None:
        averaged = state.parameters.keys() & manifest.files_by_name(FileKind.AVERAGE).keys()
        state = replace(state, averages={**state.averages, **state.start_averages(averaged)})
    check_averages(manifest, reader, state)
    extra = _decoded_state(manifest, reader)
    by_name = _options_by_name(manifest, reader, state)
    groups: Sequence[Sequence[Mapping[str, Any]]] = ()
    if state.optimizers:
        groups = _groups(manifest, state, by_name, of_rank_0=extra.optimizer_groups, where=where)
        check_optimizer_states(manifest, reader, state.parameters)
    with located_errors(where):
        resolved = _registered(manifest, reader, state, extra.user)
    entries = resolved.states.pop(OPTIMIZER_ENTRIES, [])
    if state.optimizers and OPTIMIZER_ENTRIES in resolved.rank_0s:
        raise MismatchError(
            f"{where} holds for each rank of a {manifest.p}x{manifest.d} shape (P x D) what {manifest.optimizer} keeps "
            "beside its parameters' state, and that differs, so none belongs to this rank: keep it by parameter, or "
            "resume in that shape"
        )
    loaded = LoadedCheckpoint(
        step=manifest.step,
        generation=manifest.generation,
        user=resolved.states,
        rank_0s=resolved.rank_0s,
        p=manifest.p,
        d=manifest.d,
        averaged=bool(manifest.files_by_name(FileKind.AVERAGE)),
        seed=manifest.seed,
        cursor=manifest.cursor,
        bytes_read=reader.bytes_read,
        store_bytes=reader.store_bytes,
        options=by_name,
        optimizers=state.optimizers,
    )
    return StagedCheckpoint(
        loaded=loaded, state=state, manifest=manifest, reader=reader, groups=groups, entries=entries
    )


def _registered(manifest: Manifest, reader: ContentReader, state: TrainingState, job: dict[str, Any]) -> ResolvedStates:
    def read(entry: FileEntry) -> FileContent:
        reader.verify_files([entry])
        return next(content for _, content in reader.read_contents([entry]))

    same_shape = (manifest.p, manifest.d) == (state.position.p, state.position.d)
    return resolve_states(manifest, job, state.names, read, rank=state.position.rank if same_shape else None)


class _StateFields(NamedTuple):
    """The contents of a manifest besides the tensors of sections."""

    user: dict[str, Any]
    optimizer_groups: list[dict[str, Any]]
    """Rank 0's groups, as an earlier version wrote them."""


def _decoded_state(manifest: Manifest, reader: ContentReader) -> _StateFields:
    where = reader.where
    tensors: dict[str, Tensor] = {}
    files = [entry for entry in manifest.files if entry.kind is FileKind.STATE]
    reader.verify_files(files)
    for _, content in reader.read_contents(files):
        tensors |= content.tensors
    with located_errors(where):
        decoded = decode_state(manifest.state, tensors)
    if not isinstance(decoded, dict):
        raise CheckpointError(f"{where}/{MANIFEST}: field state is no mapping")
    user, groups = decoded.get("user"), decoded.get("optimizer_groups", [])
    if not isinstance(user, dict):
        raise CheckpointError(f"{where}/{MANIFEST}: field state.user is no mapping")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{where}/{MANIFEST}: field state.optimizer_groups is no list of mappings")
    return _StateFields(user, groups)


def _options_by_name(manifest: Manifest, reader: ContentReader, state: TrainingState) -> OptionsByName:
    entries = [entry for entry in manifest.files if entry.kind is FileKind.OPTIONS]
    reader.verify_files(entries)
    tensors = {name: tensor for _, content in reader.read_contents(entries) for name, tensor in content.tensors.items()}
    where = reader.where
    with located_errors(where):
        return OptionsByName(manifest.groups, tensors, state.names_by_id, where)


def _groups(
    manifest: Manifest, state: TrainingState, by_name: OptionsByName, *, of_rank_0: list[dict[str, Any]], where: str
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """The options of each optimizer's groups. Raises MismatchError for optimizers that cannot take them over."""
    if manifest.optimizer is None:
        raise MismatchError(f"{where} holds no optimizer state: load it before the optimizer is set")
    if manifest.groups:
        return by_name.list_options(state.optimizers)
    return [options_by_place(manifest, of_rank_0, state.optimizers, where)]
