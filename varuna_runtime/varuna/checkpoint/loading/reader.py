"""Reads the files of one checkpoint twice: first to verify them, then to load them one after the other.

Loading verifies every file before it changes anything, and never holds more than a few files in host memory. The second
read of a local file comes from the page cache. The first read from an object store keeps the bytes in an unnamed
temporary file; without room for that, the second pass reads the store again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, NamedTuple, Protocol

import structlog
from torch import Tensor

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format import tensor_file
from varuna.checkpoint.format.checksum import Checksum
from varuna.checkpoint.format.manifest import FileEntry
from varuna.checkpoint.storage.store import CheckpointStore, allocate_aligned, folder_of
from varuna.checkpoint.storage.windows import map_ahead
from varuna.diagnostics.loading_progress import LOADING_PROGRESS

__all__ = ["ContentReader", "FileContent", "FileReader"]

_log = structlog.get_logger(__name__)

_VERIFIED_AT_ONCE = 4
"""Files; each takes a few megabytes of memory meanwhile."""
_READ_AHEAD = 2
"""Files in memory at once while the model is filled: one is copied into place, one is read."""


class FileContent(NamedTuple):
    """The contents of a safetensors file."""

    tensors: dict[str, Tensor]
    """On the meta device when only the header was read."""
    metadata: dict[str, str]


class ContentReader(Protocol):
    """Reads the files of one state, wherever they are. Its methods raise CheckpointError, naming what is at fault."""

    @property
    def where(self) -> str:
        """The state's location, for messages."""

    @property
    def bytes_read(self) -> int: ...

    @property
    def store_bytes(self) -> int:
        """Bytes of them that came from a checkpoint store."""

    @property
    def peer_bytes(self) -> int:
        """Bytes of them that came from the memories of other processes."""

    def verify_files(self, entries: Iterable[FileEntry]) -> None:
        """Checks files as far as that is possible before they are loaded."""

    def read_outline(self, entry: FileEntry) -> FileContent:
        """The contents of the file's header: tensors without memory, and the metadata."""

    def read_contents(self, entries: Iterable[FileEntry]) -> Iterator[tuple[FileEntry, FileContent]]:
        """Each file, in any order, with its tensors in host memory of their own."""

    def url_of(self, entry: FileEntry) -> str: ...


class _VerifiedFile(NamedTuple):
    outline: FileContent
    source: CheckpointStore | IO[bytes]
    """Where the second read finds the file: this VM's folder of copies, the store, or the spool file."""
    fault: str
    """What is wrong with the copy that this VM should have; "": nothing."""


@dataclass
class FileReader:
    """Reads and verifies files of one checkpoint: the copy on this VM, if there is one, else the store's."""

    store: CheckpointStore
    step: int
    bytes_read: int = 0
    store_bytes: int = 0
    peer_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    """What is wrong with the copies that this VM should have."""
    _verified: dict[str, _VerifiedFile] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return self.store.url_of(self.step)

    def verify_files(self, entries: Iterable[FileEntry]) -> None:
        """Streams these files once and compares their checksums. Raises CheckpointError naming one that is damaged."""
        wanted = list({entry.name: entry for entry in entries if entry.name not in self._verified}.values())
        if not wanted:
            return
        for entry, verified in zip(wanted, map_ahead(self._verify, wanted, ahead=_VERIFIED_AT_ONCE), strict=True):
            self._verified[entry.name] = verified
            self.bytes_read += entry.bytes
            if not entry.local or verified.fault:
                self.store_bytes += entry.bytes
            self.faults += [verified.fault] if verified.fault else []

    def read_outline(self, entry: FileEntry) -> FileContent:
        """The contents of the verified file's header: tensors without memory, and the metadata."""
        self.verify_files([entry])
        return self._verified[entry.name].outline

    def read_contents(self, entries: Iterable[FileEntry]) -> Iterator[tuple[FileEntry, FileContent]]:
        """Each file with its tensors in host memory of their own. Raises CheckpointError naming a damaged one."""
        wanted = list({entry.name: entry for entry in entries}.values())
        if wanted:
            yield from zip(wanted, map_ahead(self._content, wanted, ahead=_READ_AHEAD), strict=True)

    def url_of(self, entry: FileEntry) -> str:
        return f"{self.store.url}/{self._path(entry)}"

    def _path(self, entry: FileEntry) -> str:
        return f"{folder_of(self.step if entry.in_step is None else entry.in_step)}/{entry.name}"

    def _verify(self, entry: FileEntry) -> _VerifiedFile:
        fault = ""
        if entry.local:
            try:
                return self._verify_in(CheckpointStore(entry.local), entry, "")
            except (CheckpointError, ValueError) as error:  # a ValueError: it is not the URL of a store
                fault = str(error)
        return self._verify_in(self.store, entry, fault)

    def _verify_in(self, store: CheckpointStore, entry: FileEntry, fault: str) -> _VerifiedFile:
        path = self._path(entry)
        kept = None if store.is_local else _SpoolFile()
        checksum = Checksum()
        header = tensor_file.HeaderReader(entry.bytes)
        try:
            for piece in store.stream_file(path, entry.bytes):
                checksum.update(piece)
                header.add_piece(piece)
                LOADING_PROGRESS.count_piece()
                if kept is not None:
                    kept.write(piece)
        except FileNotFoundError:
            raise CheckpointError(f"{store.url}/{path} is missing, or not of {entry.bytes} bytes") from None
        _compare(checksum, entry, f"{store.url}/{path}")
        try:
            outline = FileContent(*header.read_outline())
        except ValueError as error:
            raise CheckpointError(f"{store.url}/{path} is not a safetensors file: {error}") from error
        file = None if kept is None else kept.file
        return _VerifiedFile(outline, store if file is None else file, fault)

    def _content(self, entry: FileEntry) -> FileContent:
        if entry.name not in self._verified:
            self._verified[entry.name] = self._verify(entry)
        source = self._verified[entry.name].source
        checksum = Checksum()
        data = allocate_aligned(entry.bytes)
        at = 0
        pieces = (
            source.stream_file(self._path(entry), entry.bytes) if isinstance(source, CheckpointStore) else _all(source)
        )
        try:
            for piece in pieces:
                data[at : at + len(piece)] = piece
                checksum.update(piece)
                at += len(piece)
                LOADING_PROGRESS.count_piece()
        except (FileNotFoundError, ValueError):
            pass  # the checksum will not match
        _compare(checksum, entry, f"{self.url_of(entry)}: it changed while it was loaded;")
        return FileContent(*tensor_file.read_tensors(data))


class _SpoolFile:
    """An unnamed file with the bytes read from an object store, if there is room for it."""

    def __init__(self) -> None:
        self.file: IO[bytes] | None = None
        try:
            self.file = tempfile.TemporaryFile(prefix="varuna-checkpoint-")  # noqa: SIM115  # lives until it is read
        except OSError as error:
            self._give_up(error)

    def write(self, piece: memoryview | bytes) -> None:
        if self.file is None:
            return
        try:
            self.file.write(piece)
        except OSError as error:
            self.file = None
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _log.info(
            "no room to keep what is read from the checkpoint store, so it is read twice",
            folder=tempfile.gettempdir(),
            error=error.strerror,
        )


def _all(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(1024 * 1024):
        yield piece


def _compare(checksum: Checksum, entry: FileEntry, where: str) -> None:
    if str(checksum) != entry.checksum:
        raise CheckpointError(f"{where} is corrupt: its checksum is {checksum} instead of {entry.checksum}")
