"""The log files of ranks. All functions but the asynchronous one touch the disk: call them in a thread."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from varuna_agent.state import WorkerKey
from varuna_agent.workers.isolation import JobUser

_POLL_S = 0.2
"""Between two reads of a log that the manager waits for."""
_MAX_WAIT_S = 60.0


def log_path(vm_dir: Path, key: WorkerKey) -> Path:
    return vm_dir / "jobs" / key.job_id / f"g{key.generation}" / f"rank{key.rank}.log"


def warm_log_path(vm_dir: Path, job_id: str) -> Path:
    """The log of the process that forks the job's workers."""
    return vm_dir / "jobs" / job_id / "warm.log"


def open_log(path: Path, user: JobUser | None = None) -> int:
    """Open a log for appending, and make its folders. The user owns the file: scripts may reopen /dev/stderr."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    if user is not None:
        os.fchown(descriptor, user.uid, user.gid)
    return descriptor


@dataclass(frozen=True)
class LogSlice:
    """Bytes of a log from `offset` on, and the whole log's size."""

    data: bytes
    offset: int
    size: int


def read_tail(path: Path, *, lines: int = 40, max_bytes: int = 16_384) -> str:
    """The last lines; empty if there is no file."""
    try:
        text = read_part(path, -max_bytes, max_bytes).data.decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def read_part(path: Path, offset: int, max_bytes: int) -> LogSlice:
    """Read at most `max_bytes` from `offset` on; a negative offset counts from the end. Raises OSError.

    If the beginning of the log was freed (see `retention.py`), the slice starts where the log does now.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        at = max(0, size + offset) if offset < 0 else min(offset, size)
        at = file.seek(_skip_hole(file.fileno(), at, size))
        return LogSlice(file.read(max_bytes), at, size)


def _skip_hole(descriptor: int, at: int, size: int) -> int:
    if at >= size or not hasattr(os, "SEEK_DATA"):
        return at
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else at  # nothing but the hole, or a file system that has none


async def read_when_written(path: Path, offset: int, max_bytes: int, wait_s: float) -> LogSlice:
    """Like `read_part`, in a thread; waits at most `wait_s` (or 60 s) for the first byte at `offset`."""
    give_up_at = time.monotonic() + min(wait_s, _MAX_WAIT_S)
    while True:
        part = await asyncio.to_thread(read_part, path, offset, max_bytes)
        if part.data or time.monotonic() >= give_up_at:
            return part
        await asyncio.sleep(_POLL_S)
