"""A store of checkpoints: a folder or an object store, by URL, through obstore.

Every put is atomic: a reader sees the whole object or none. `create` succeeds for exactly one of many writers.

A failed read is retried for a moment, because a short outage of the store must not cost a job its checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore.store import LocalStore, ObjectStore

from varuna.checkpoint.errors import StoreError
from varuna.checkpoint.format.tensor_file import ALIGNMENT
from varuna.checkpoint.storage.remote import open_remote, stream_ranges
from varuna.diagnostics.error_text import first_line

T = TypeVar("T")

__all__ = ["CheckpointStore", "allocate_aligned", "folder_of", "local_path", "sync_path"]

_FOLDER = re.compile(r"varuna_ckpt_(0|[1-9][0-9]*)")
_PART_BYTES = 16 * 1024 * 1024
"""Size of one part of an upload: an object store takes at most 10,000 parts."""
_PARTS_AT_ONCE = 4
_LOCAL_PART_BYTES = 4 * 1024 * 1024
"""Small, so that one part is written while the next is made."""
_READ_BYTES = 1024 * 1024
"""Small enough to be still in the cache when the checksum is taken."""
_UNFINISHED = re.compile(r"#[0-9]+$")
"""The end of the name of a file that obstore has not finished, or never will because its process was killed."""
_PATIENCE_S = 10.0
"""How long a failed read is retried. Clients of object stores have already retried for minutes by then."""
_FIRST_PAUSE_S = 0.1
_FINAL_ERRORS = (
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    obstore.exceptions.PermissionDeniedError,
    obstore.exceptions.UnauthenticatedError,
)
"""Errors for which a retry does not help."""
_MISSING = (FileNotFoundError, obstore.exceptions.NotFoundError)


def folder_of(step: int) -> str:
    """The folder of the checkpoint of `step` within its store."""
    return f"varuna_ckpt_{step}"


def sync_path(path: Path) -> None:
    """Returns when a file's content, or the names in a folder, will survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointStore:
    """A store of checkpoints.

    `url` is a plain path, `file://`, `s3://`, `abfs://`, `gs://` or anything else that obstore opens. A local folder is
    created by the first put, and reads as empty until then. Raises ValueError for a malformed URL.
    """

    def __init__(self, url: str, *, on_answer: Callable[[], None] = lambda: None) -> None:
        """`on_answer` is called after each answer of the store about what it has, and each object that is read whole or
        in a range; not for the pieces of `stream_file`."""
        if not url:
            raise ValueError("the checkpoint URL is empty: give a folder, or file://…, s3://…, abfs://…")
        self._local = local_path(url)
        self.url = self._local.as_uri() if self._local is not None else url.rstrip("/")
        self._on_answer = on_answer
        self._opened: ObjectStore | None = None
        if self._local is None:
            try:
                self._opened = open_remote(self.url)  # makes no request
            except (ValueError, obstore.exceptions.BaseError) as error:
                raise ValueError(
                    f"checkpoint URL {url!r}: {first_line(error)}; give a folder, or file:///…, s3://…, abfs://…, gs://…"
                ) from error

    def url_of(self, step: int) -> str:
        return f"{self.url}/{folder_of(step)}"

    def put(self, path: str, data: bytes | Iterator[memoryview]) -> None:
        """Create or replace an object, whole or piece by piece. Raises StoreError when the store refuses."""
        with _StoreErrors(self.url, path):
            part_bytes = _PART_BYTES if self._local is None else _LOCAL_PART_BYTES
            obstore.put(self._open(), path, data, chunk_size=part_bytes, max_concurrency=_PARTS_AT_ONCE)

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder of this machine."""
        return self._local is not None

    def stream_file(self, path: str, size: int) -> Iterator[memoryview]:
        """An object of `size` bytes, piece by piece; a piece is valid until the next one is taken.

        Raises FileNotFoundError when there is no object of this size, StoreError when it cannot be read.
        """
        pieces = self._stream_remote(path, size) if self._local is None else self._stream_file(self._local / path, size)
        with _StoreErrors(self.url, path), closing(pieces):
            at = 0
            for piece in pieces:
                at += len(piece)
                yield piece
        if at != size:
            raise FileNotFoundError(path)

    def _stream_remote(self, path: str, size: int) -> Generator[memoryview]:
        with suppress(*_MISSING), closing(stream_ranges(self._open(), path, size)) as ranges:
            yield from ranges

    def _stream_file(self, path: Path, size: int) -> Generator[memoryview]:
        with suppress(*_MISSING), _retry_read(lambda: path.open("rb", buffering=0)) as file:
            if os.fstat(file.fileno()).st_size != size:
                return
            buffer = memoryview(bytearray(min(size, _READ_BYTES)))
            while count := _retry_read(lambda: file.readinto(buffer)):
                yield buffer[:count]

    def create(self, path: str, data: bytes) -> bool:
        """Write an object unless it exists; returns whether this call wrote it."""
        with _StoreErrors(self.url, path):
            try:
                obstore.put(self._open(), path, data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return False
            return True

    def get(self, path: str) -> bytes | None:
        """The object's bytes; None if it does not exist."""
        if not self._exists():
            return None
        with _StoreErrors(self.url, path):
            return self._ask(lambda: self._get_once(path))

    def _get_once(self, path: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._open(), path).bytes())
        except _MISSING:
            return None

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes from `start` on, fewer at the object's end. Raises StoreError if it does not exist."""
        with _StoreErrors(self.url, path):
            data = bytes(obstore.get_range(self._open(), path, start=start, length=length))
        self._on_answer()
        return data

    def list_sizes(self, step: int) -> dict[str, int]:
        """Size in bytes of each file in the folder of `step`, by its name within the folder."""
        folder = folder_of(step)
        with _StoreErrors(self.url, folder):
            return self._ask(lambda: self._sizes_once(folder))

    def _sizes_once(self, folder: str) -> dict[str, int]:
        if self._local is not None:
            entries = _entries(self._local / folder)
            return {
                entry.name: entry.stat().st_size
                for entry in entries
                if entry.is_file() and not _UNFINISHED.search(entry.name)
            }
        listed = obstore.list(self._open(), prefix=folder).collect()
        return {meta["path"].removeprefix(f"{folder}/"): meta["size"] for meta in listed}

    def list_steps(self) -> list[int]:
        """The steps that have a folder, complete or not, ascending."""
        with _StoreErrors(self.url, ""):
            matches = (_FOLDER.fullmatch(name) for name in self._ask(self._folders_once))
        return sorted(int(match[1]) for match in matches if match)

    def _folders_once(self) -> list[str]:
        if self._local is not None:
            return [entry.name for entry in _entries(self._local) if entry.is_dir()]
        prefixes = obstore.list_with_delimiter(self._open())["common_prefixes"]
        return [prefix.rsplit("/", 1)[-1] for prefix in prefixes]

    def delete_file(self, path: str) -> None:
        """Delete one object, if it exists."""
        with _StoreErrors(self.url, path):
            try:
                obstore.delete(self._open(), path)
            except _MISSING:
                return

    def delete_folder(self, step: int, *, first: str = "", keep: Collection[str] = ()) -> None:
        """Delete the files in the folder of `step`, except those in `keep`; `first` before the others.

        A missing file is no error.
        """
        folder = folder_of(step)
        names = sorted(self.list_sizes(step).keys() - set(keep), key=lambda name: (name != first, name))
        for name in names:
            self.delete_file(f"{folder}/{name}")
        if self._local is not None and not keep:
            # A killed writer leaves a partial file, which obstore neither lists nor deletes.
            shutil.rmtree(self._local / folder, ignore_errors=True)

    def sync_files(self, step: int, names: Iterable[str]) -> None:
        """Returns when these files of `step` will survive a power cut. In an object store they do after a put."""
        names = list(names)
        if self._local is None or not names:
            return
        folder = self._local / folder_of(step)
        with _StoreErrors(self.url, folder.name):
            # Folders last: they hold the files' names.
            for path in (*(folder / name for name in names), folder, self._local):
                sync_path(path)

    def _ask(self, request: Callable[[], T]) -> T:
        answer = _retry_read(request)
        self._on_answer()
        return answer

    def _exists(self) -> bool:
        return self._local is None or self._local.is_dir()

    def _open(self) -> ObjectStore:
        if self._opened is None:
            assert self._local is not None
            self._opened = LocalStore(self._local, mkdir=True)
        return self._opened


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, except names that are not UTF-8: obstore would refuse a folder with one."""
    try:
        with os.scandir(folder) as found:
            return [entry for entry in found if _is_utf8(entry.name)]
    except FileNotFoundError:
        return []


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _retry_read(read: Callable[[], T]) -> T:
    """The result of `read`, which is retried when it fails."""
    deadline_s = time.monotonic() + _PATIENCE_S
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return read()
        except (*_FINAL_ERRORS, *_MISSING):
            raise
        except (obstore.exceptions.BaseError, OSError):
            if time.monotonic() + pause_s > deadline_s:
                raise
        time.sleep(pause_s)
        pause_s *= 2


def allocate_aligned(size: int) -> memoryview:
    """New aligned memory. NumPy asks for huge pages, so it costs a third of a bytearray."""
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return memoryview(raw[start : start + size])  # type: ignore[arg-type]  # a buffer, as stubs say from 3.12 on


class _StoreErrors:
    """Turns a store's own errors into StoreErrors with the location."""

    def __init__(self, url: str, path: str) -> None:
        self._where = f"{url}/{path}".rstrip("/")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, obstore.exceptions.BaseError | OSError):
            raise StoreError(f"checkpoint store {self._where}: {first_line(error)}") from error


def local_path(url: str) -> Path | None:
    """The folder that `url` names; None if it is not on this machine."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"checkpoint URL {url!r}: file:// takes an absolute path, as in file:///{parts.netloc}…")
        return Path(unquote(parts.path))
    if "://" in url:
        return None
    return Path(url).expanduser().absolute()
