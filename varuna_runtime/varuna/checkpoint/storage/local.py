"""Copies of checkpoint files on this VM's own disk, or in its RAM, for workers that start here again.

They are written before the store's files, and are no checkpoint by themselves: only the store's manifest completes one.
It says where each file's writer has a copy; a reader looks there first, and uses the copy if its checksum is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import structlog

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import MANIFEST
from varuna.checkpoint.storage.answers import ask_store
from varuna.checkpoint.storage.store import CheckpointStore, folder_of, local_path

__all__ = ["LocalCopies", "on_one_disk"]

_log = structlog.get_logger(__name__)

_CHECKPOINTS_KEPT = 3
"""Few, because the folder may be in RAM, and workers that start here again need only the newest."""


class LocalCopies:
    """The copies of one rank's files of one checkpoint. A failure is only logged."""

    def __init__(self, folder: str, step: int) -> None:
        self._folder = CheckpointStore(folder)
        self._step = step

    def write_files(self, files: Mapping[str, Iterator[memoryview]]) -> str:
        """Writes all files (name -> content) or none; returns the URL of the folder of copies, "" for none."""
        try:
            for name, content in files.items():
                self._folder.put(f"{folder_of(self._step)}/{name}", content)
        except CheckpointError as error:
            _log.warning("no local copies of this checkpoint, only in the store", step=self._step, error=str(error))
            self.delete_files(files)
            return ""
        return self._folder.url

    def delete_files(self, names: Iterable[str]) -> None:
        """Deletes the copies of these files."""
        try:
            for name in names:
                self._folder.delete_file(f"{folder_of(self._step)}/{name}")
        except CheckpointError as error:
            _log.warning("local copies stay", step=self._step, error=str(error))

    def delete_outdated(self, store: CheckpointStore) -> None:
        """Deletes the copies of earlier checkpoints' files that `store` no longer has, and of all but the newest."""
        try:
            there = set(store.list_steps())
            earlier = [step for step in self._folder.list_steps() if step < self._step]
            newest = set(earlier[1 - _CHECKPOINTS_KEPT :])
            for step in earlier:
                names = store.list_sizes(step) if step in there else {}
                if MANIFEST not in names or step not in newest:
                    self._folder.delete_folder(step, keep=names if MANIFEST not in names else ())
        except CheckpointError as error:
            _log.warning("old local copies stay", step=self._step, error=str(error))


def on_one_disk(url: str, folder: str) -> bool:
    """Whether the store at `url` is, or will be, on the same disk as `folder`, so that a copy would gain nothing.

    A store that does not answer in time is on another one. Raises ValueError when `folder` is not on this machine.
    """
    store, copies = local_path(url), local_path(folder)
    if copies is None:
        raise ValueError(f"{folder!r} is to hold copies of checkpoints for this VM: give a local folder")
    if store is None:
        return False
    return ask_store(url, lambda: _device(store) == _device(copies), otherwise=False)


def _device(path: Path) -> int:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return existing.stat().st_dev
