"""Files that several checkpoints share: frozen parameters are written twice in all, not at every save.

A manifest may name a file that lies in an earlier checkpoint's folder. It refers to the one before the
newest, so the two newest checkpoints never share a file, and harm to one leaves the other whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.checksum import Checksum
from varuna.checkpoint.format.manifest import MANIFEST, FileEntry, Manifest, parse_sealed_document
from varuna.checkpoint.storage.store import CheckpointStore, folder_of

__all__ = ["EarlierFiles", "files_referred_to", "require_present"]

_IS_MANIFEST = re.compile(r"manifest\.([a-z-]+-[0-9]+\.)?json")
"""Of a checkpoint, or of one that was set aside or given up."""


class EarlierFiles:
    """The files that a checkpoint of `step` may refer to instead of writing them.

    `trusted`: (step, name) of files that this process has written or verified, which it adds to. One that came from
    elsewhere is read once: harm to it must not go on into every later checkpoint.
    """

    def __init__(self, store: CheckpointStore, step: int, *, keep: int, trusted: set[tuple[int, str]]) -> None:
        self._store = store
        self._trusted = trusted
        self._by_content: dict[tuple[str, int], FileEntry] = {}
        self._sizes: dict[int, dict[str, int]] = {}
        manifests: list[Manifest] = []
        for earlier in reversed([one for one in store.list_steps() if one < step]):
            if len(manifests) == min(keep, 2):
                break
            if (manifest := _manifest(store, earlier)) is not None:
                manifests.append(manifest)
        if len(manifests) == min(keep, 2):
            base = manifests[-1]
            for entry in base.files:
                home = base.step if entry.in_step is None else entry.in_step
                self._by_content[entry.checksum, entry.bytes] = entry.model_copy(update={"in_step": home})

    def match_file(self, entry: FileEntry) -> FileEntry | None:
        """The earlier file with the same content; None: there is none."""
        found = self._by_content.get((entry.checksum, entry.bytes))
        if found is None or found.holds != entry.holds or found.kind is not entry.kind:
            return None
        assert found.in_step is not None
        if found.in_step not in self._sizes:
            self._sizes[found.in_step] = self._store.list_sizes(found.in_step)
        is_there = self._sizes[found.in_step].get(found.name) == found.bytes
        return found if is_there and self._is_sound(found.in_step, found) else None

    def _is_sound(self, home: int, entry: FileEntry) -> bool:
        if (home, entry.name) in self._trusted:
            return True
        checksum = Checksum()
        try:
            for piece in self._store.stream_file(f"{folder_of(home)}/{entry.name}", entry.bytes):
                checksum.update(piece)
        except (CheckpointError, FileNotFoundError):
            return False
        if str(checksum) != entry.checksum:
            return False
        self._trusted.add((home, entry.name))
        return True


def require_present(store: CheckpointStore, files: Iterable[FileEntry]) -> None:
    """Raises CheckpointError unless the files that lie in other folders are there."""
    sizes: dict[int, dict[str, int]] = {}
    for entry in files:
        if entry.in_step is None:
            continue
        if entry.in_step not in sizes:
            sizes[entry.in_step] = store.list_sizes(entry.in_step)
        if sizes[entry.in_step].get(entry.name) != entry.bytes:
            raise CheckpointError(f"{store.url_of(entry.in_step)}/{entry.name} vanished while a save referred to it")


def files_referred_to(store: CheckpointStore, steps: Iterable[int]) -> dict[int, set[str]]:
    """For each step: the files in its folder that the checkpoints of `steps` refer to. So do those that were set aside
    or given up, which come back when their manifests are renamed.

    Raises StoreError when a manifest cannot be read, because then the answer is unknown.
    """
    found: dict[int, set[str]] = {}
    for step in steps:
        for name in store.list_sizes(step):
            manifest = _manifest(store, step, name) if _IS_MANIFEST.fullmatch(name) else None
            for entry in manifest.files if manifest is not None else ():
                if entry.in_step is not None:
                    found.setdefault(entry.in_step, set()).add(entry.name)
    return found


def _manifest(store: CheckpointStore, step: int, name: str = MANIFEST) -> Manifest | None:
    data = store.get(f"{folder_of(step)}/{name}")
    try:
        return None if data is None else parse_sealed_document(Manifest, data, f"{store.url_of(step)}/{name}")
    except CheckpointError:  # a harmed one, which no rank will load either
        return None
