"""Locks on files: one manager for a data directory, and one for an SQLite store.

The kernel releases a lock when its process ends, however that happens; a reused process id cannot be mistaken for a
manager.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sqlalchemy import make_url

from varuna_manager.errors import StartError


@contextlib.contextmanager
def hold_data_dir(data_dir: Path) -> Iterator[None]:
    """Hold the data directory during the block. Raises StartError if another manager runs there."""
    with _hold(data_dir / "manager.lock", f"data_dir {data_dir}", "give another --data-dir"):
        yield


@contextlib.contextmanager
def hold_sqlite(url: str) -> Iterator[None]:
    """Hold an SQLite store during the block, whatever path leads to it; no other database. Raises StartError."""
    path = _sqlite_path(url)
    if path is None:
        yield
        return
    with _hold(path.with_name(f"{path.name}.lock"), f"the store {path}", "give another --database-url"):
        yield


def _sqlite_path(url: str) -> Path | None:
    """The database's file, with symbolic links resolved. Raises StartError for SQLite without a plain file."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    name = parsed.database or ""
    if name in ("", ":memory:") or name.startswith("file:"):
        raise StartError(f"database_url {url}: give the path of a file, sqlite:///path/to/file")
    path = Path(name).resolve()
    if not path.parent.is_dir():
        raise StartError(f"database_url {url}: folder {path.parent} does not exist: make it, or give another path")
    return path


@contextlib.contextmanager
def _hold(path: Path, what: str, way_out: str) -> Iterator[None]:
    try:
        file = path.open("a+")
    except OSError as error:
        raise StartError(f"{what} cannot be used ({path}: {error.strerror}): {way_out}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartError(f"another manager{_render_holder(file)} runs on {what}: stop it, or {way_out}") from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def _render_holder(file: TextIO) -> str:
    """Which process wrote the lock's file; empty while it is being written."""
    file.seek(0)
    try:
        document = json.loads(file.read())
        return f" (pid {document['pid']} on {document['host']})"
    except (ValueError, KeyError, TypeError):
        return ""
