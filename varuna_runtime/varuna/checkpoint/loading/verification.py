"""Checks that a checkpoint fits this rank's state and is whole. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from varuna.checkpoint.errors import CheckpointError, MismatchError
from varuna.checkpoint.format.manifest import FileEntry, FileKind, Manifest
from varuna.checkpoint.loading.reader import ContentReader
from varuna.checkpoint.state.rank_state import TrainingState, optimizer_states

__all__ = [
    "check_averages",
    "check_names",
    "check_optimizer_states",
    "check_values",
    "files_holding",
    "located_errors",
]


def files_holding(manifest: Manifest, kind: FileKind, names: Iterable[str]) -> list[FileEntry]:
    """The files of `kind` that hold these names, each once; a name in no file is left out."""
    by_name = manifest.files_by_name(kind)
    return list({by_name[name].name: by_name[name] for name in names if name in by_name}.values())


@contextmanager
def located_errors(where: str) -> Iterator[None]:
    """Adds the checkpoint's location to errors."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_names(manifest: Manifest, state: TrainingState, where: str) -> None:
    """Raises MismatchError unless the checkpoint holds what the model has, and nothing else."""
    held = manifest.files_by_name(FileKind.PARAMETERS)
    # A parameter that no section uses is in no checkpoint, even if both models have it.
    whole = dict.fromkeys((*state.tensors, *state.state_dict.values()))
    missing = [
        name
        for name in whole
        if name not in held and (name in state.tensors or name not in manifest.state_dict.values())
    ]
    known = {*state.tensors, *state.section_of, *state.state_dict.values()}
    # Without the names of the whole model, other stages' parameters cannot be distinguished from unknown ones.
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


def check_values(manifest: Manifest, reader: ContentReader, state: TrainingState) -> None:
    reader.verify_files(files_holding(manifest, FileKind.PARAMETERS, state.tensors))
    files = manifest.files_by_name(FileKind.PARAMETERS)
    for name, tensor in state.tensors.items():
        saved = reader.read_outline(files[name]).tensors.get(name)
        if saved is None:
            raise CheckpointError(f"{reader.url_of(files[name])} does not hold {name}, as it should")
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise MismatchError(
                f"{reader.where}: {name} is {saved.dtype} {list(saved.shape)} there and "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )


def check_averages(manifest: Manifest, reader: ContentReader, state: TrainingState) -> None:
    reader.verify_files(files_holding(manifest, FileKind.AVERAGE, state.averages))
    files = manifest.files_by_name(FileKind.AVERAGE)
    for name, average in state.averages.items():
        saved = reader.read_outline(files[name]).tensors.get(name, average) if name in files else average
        if saved.shape != average.shape:
            raise CheckpointError(f"{reader.url_of(files[name])}: the average of {name} has another shape")


def check_optimizer_states(manifest: Manifest, reader: ContentReader, names: Iterable[str]) -> None:
    files = files_holding(manifest, FileKind.OPTIMIZER, names)
    reader.verify_files(files)
    for entry in files:
        where = reader.url_of(entry)
        outline = reader.read_outline(entry)
        with located_errors(where):
            states = optimizer_states(outline.metadata, outline.tensors)
        for name in entry.holds:
            if not isinstance(states.get(name), dict):
                raise CheckpointError(f"{where} has no state of {name}")
