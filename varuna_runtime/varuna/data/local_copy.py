"""Datasets by URL, copied to this VM once for all its workers, and for later generations and jobs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import obstore
import structlog
from obstore.store import ObjectStore

from varuna.checkpoint.storage.remote import open_remote, stream_ranges
from varuna.checkpoint.storage.store import sync_path
from varuna.diagnostics.error_text import first_line

__all__ = ["local_copy"]

_log = structlog.get_logger("varuna")


@dataclass(frozen=True)
class _Object:
    path: str
    """From the store's root."""
    below: str
    """From the given folder; for a file its name."""
    size: int
    mark: str
    """Changes with the content."""


def local_copy(url: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Copies a file, or a folder with everything below it, from `url` to this VM; returns the path of the copy.

    It is copied once. Other workers wait for the copy, and later callers use it until the size, date or ETag at the URL
    changes, or a file of the copy has another size. A path or a `file://` URL is returned without a copy.

    Args:
        url: `s3://`, `gs://`, `abfs://`, …; `http://` and `https://` for files only. Credentials come from
            the environment.
        folder: the folder of all copies; None: VARUNA_DATA_DIR, or `~/.cache/varuna/data`. Copies stay until you delete
            them.

    Raises:
        ValueError: the URL is malformed.
        FileNotFoundError: there is nothing at the URL.
        OSError: the URL cannot be read, or the copy cannot be written.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        path = Path(unquote(parts.path) if parts.scheme else url)
        if not path.exists():
            raise FileNotFoundError(f"there is nothing at {url}: give another path or URL")
        return path
    kept = Path(folder or os.environ.get("VARUNA_DATA_DIR") or Path.home() / ".cache/varuna/data")
    store, wanted = _open_store(url), unquote(parts.path).strip("/")
    try:
        objects = _list_objects(store, wanted)
        if not objects:
            raise FileNotFoundError(f"there is nothing at {url}: give another path or URL")
        marks = json.dumps([url, *sorted((one.below, one.size, one.mark) for one in objects)])
        home = kept / hashlib.sha256(marks.encode()).hexdigest()[:20]
        _copy_once(store, objects, home)
    except obstore.exceptions.BaseError as error:
        raise OSError(f"{url} cannot be read: {first_line(error)}") from error
    is_file = len(objects) == 1 and objects[0].path == wanted
    return home / objects[0].below if is_file else home


def _open_store(url: str) -> ObjectStore:
    """The store of the URL, without a request to it."""
    parts = urlsplit(url)
    root = f"{parts.scheme}://{parts.netloc}"
    try:
        return open_remote(root)
    except (ValueError, obstore.exceptions.BaseError) as error:
        raise ValueError(f"data URL {url!r}: {first_line(error)}; give a path, or s3://…, abfs://…, gs://…") from error


def _list_objects(store: ObjectStore, wanted: str) -> list[_Object]:
    try:
        file = obstore.head(store, wanted) if wanted else None
    except FileNotFoundError:
        file = None
    if file is not None:
        return [_object(file, PurePosixPath(wanted).name)]
    found = obstore.list(store, prefix=wanted or None).collect()
    return [_object(one, one["path"].removeprefix(wanted).lstrip("/")) for one in found]


def _object(meta: obstore.ObjectMeta, below: str) -> _Object:
    return _Object(meta["path"], below, meta["size"], meta["e_tag"] or str(meta["last_modified"]))


def _copy_once(store: ObjectStore, objects: Sequence[_Object], home: Path) -> None:
    """Makes `home` with the objects in it, unless it has them. It appears when all of them are copied."""
    if _is_whole(home, objects):
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when this process ends in any way
        if _is_whole(home, objects):
            return
        half = home.with_suffix(".part")
        shutil.rmtree(half, ignore_errors=True)  # left by a process that was killed
        _log.info("copying data", files=len(objects), bytes=sum(one.size for one in objects), to=str(home))
        for one in objects:
            target = half / one.below
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                for chunk in stream_ranges(store, one.path, one.size):
                    file.write(chunk)
            if target.stat().st_size != one.size:
                raise OSError(f"{one.path} changed during the copy: try again")
            sync_path(target)
        # A VM may lose its power and come back with its disk: whatever has the name `home` then must be whole.
        for folder, _, _ in os.walk(half, topdown=False):
            sync_path(Path(folder))
        if home.exists():
            _log.warning("a copy of data has lost files or parts of them: it is copied again", folder=str(home))
            shutil.rmtree(home)
        half.rename(home)
        sync_path(home.parent)


def _is_whole(home: Path, objects: Sequence[_Object]) -> bool:
    """Whether each object is there in its size."""
    try:
        return all((home / one.below).stat().st_size == one.size for one in objects)
    except FileNotFoundError:
        return False
