"""The log files of ranks. All functions but the asynchronous one touch the disk: call them in a thread."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from varuna_agent.isolation import JobUser
from varuna_agent.state import WorkerKey

_LOOK_S = 0.2
"""Between looks at a log that somebody waits for."""
_MOST_WAIT_S = 60.0


def log_path(vm_dir: Path, key: WorkerKey) -> Path:
    return vm_dir / "jobs" / key.job_id / f"g{key.generation}" / f"rank{key.rank}.log"


def warm_log_path(vm_dir: Path, job_id: str) -> Path:
    """Of the process from which the job's workers are forked."""
    return vm_dir / "jobs" / job_id / "warm.log"


def open_log(path: Path, user: JobUser | None = None) -> int:
    """A file descriptor that appends; folders are made. The file is the user's: scripts may open /dev/stderr anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    if user is not None:
        os.fchown(descriptor, user.uid, user.gid)
    return descriptor


@dataclass(frozen=True)
class LogPart:
    """Bytes of a log from `offset` on, and the whole log's size."""

    data: bytes
    offset: int
    size: int


def tail(path: Path, *, lines: int = 40, max_bytes: int = 16_384) -> str:
    """The last lines; empty when there is no file."""
    try:
        text = read_part(path, -max_bytes, max_bytes).data.decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def read_part(path: Path, offset: int, max_bytes: int) -> LogPart:
    """At most max_bytes from offset on; a negative offset counts from the end. Raises OSError.

    Where the log's beginning was freed (see `log_retention.py`), the part begins where the log does now.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        at = max(0, size + offset) if offset < 0 else min(offset, size)
        at = file.seek(_after_hole(file.fileno(), at, size))
        return LogPart(file.read(max_bytes), at, size)


def _after_hole(descriptor: int, at: int, size: int) -> int:
    if at >= size or not hasattr(os, "SEEK_DATA"):
        return at
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else at  # nothing but the hole, or a file system that has none


async def read_when_there(path: Path, offset: int, max_bytes: int, wait_s: float) -> LogPart:
    """As `read_part`, in a thread. When there is nothing at offset: as soon as there is, at most `wait_s` later."""
    give_up = time.monotonic() + min(wait_s, _MOST_WAIT_S)
    while True:
        part = await asyncio.to_thread(read_part, path, offset, max_bytes)
        if part.data or time.monotonic() >= give_up:
            return part
        await asyncio.sleep(_LOOK_S)
