"""Finds the complete checkpoints of a store, and reads their manifests."""

from __future__ import annotations

from collections.abc import Callable

from varuna.checkpoint.errors import CheckpointError, StoreError
from varuna.checkpoint.format.manifest import MANIFEST, Manifest, file_generation, parse_sealed_document
from varuna.checkpoint.storage.store import CheckpointStore, folder_of
from varuna.diagnostics.loading_progress import LOADING_PROGRESS

__all__ = [
    "ReportPassedOver",
    "last_written_generation",
    "newest_complete",
    "newest_readable_step",
    "open_to_load",
    "read_complete_manifest",
    "read_manifest",
]

ReportPassedOver = Callable[[int, str], None]
"""Receives the step of a checkpoint that was passed over, and what is wrong with it."""


def newest_complete(url: str, *, before: int | None = None, report: ReportPassedOver | None = None) -> int | None:
    """The newest step (below `before`, if given) with a whole checkpoint: manifest, files, sizes. None: there is none.

    `load_checkpoint` verifies the files' checksums. Raises CheckpointError when the store cannot be listed.
    """
    return newest_readable_step(open_to_load(url), before=before, report=report)


def open_to_load(url: str) -> CheckpointStore:
    """The store at `url`, each of whose answers is a sign of life. Raises ValueError for a malformed URL."""
    return CheckpointStore(url, on_answer=LOADING_PROGRESS.count_piece)


def newest_readable_step(
    store: CheckpointStore, *, before: int | None = None, report: ReportPassedOver | None = None, strict: bool = False
) -> int | None:
    """As `newest_complete`. `strict`: a manifest that the store refuses to return raises StoreError."""
    for step in reversed(store.list_steps()):
        if before is not None and step >= before:
            continue
        try:
            if not store.list_sizes(step):  # all that is left of a save that failed
                continue
            read_complete_manifest(store, step)
        except CheckpointError as error:
            if strict and isinstance(error, StoreError):
                raise
            if report is not None:
                report(step, str(error))
            continue
        return step
    return None


def last_written_generation(url: str) -> int:
    """The highest generation with files in the store, of complete checkpoints or not; 0: none."""
    store = CheckpointStore(url)
    written = (file_generation(name) or 0 for step in store.list_steps() for name in store.list_sizes(step))
    return max(written, default=0)


def read_manifest(url: str, step: int) -> Manifest:
    """Reads the manifest of a complete checkpoint. Raises CheckpointError saying what is wrong or missing."""
    return read_complete_manifest(open_to_load(url), step)


def read_complete_manifest(store: CheckpointStore, step: int) -> Manifest:
    where = store.url_of(step)
    present = store.list_sizes(step)
    if not present:
        raise CheckpointError(f"{where} does not exist")
    data = store.get(f"{folder_of(step)}/{MANIFEST}")
    if data is None:
        raise CheckpointError(f"{where} has no {MANIFEST}: its writing was interrupted")
    manifest = parse_sealed_document(Manifest, data, f"{where}/{MANIFEST}")
    if manifest.step != step:
        raise CheckpointError(f"{where}/{MANIFEST} is of step {manifest.step}")
    folders = {step: present}
    for entry in manifest.files:
        home = step if entry.in_step is None else entry.in_step
        if home not in folders:
            folders[home] = store.list_sizes(home)
        file, size = f"{store.url_of(home)}/{entry.name}", folders[home].get(entry.name)
        if size is None:
            raise CheckpointError(f"{file} is missing")
        if size != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes instead of {entry.bytes}")
    return manifest
