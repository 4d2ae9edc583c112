"""The log files of ranks. All functions touch the disk: call them in a thread."""

from __future__ import annotations

import os
from pathlib import Path

from varuna_agent.isolation import JobUser
from varuna_agent.state import WorkerKey


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


def tail(path: Path, *, lines: int = 40, max_bytes: int = 16_384) -> str:
    """The last lines; empty when there is no file."""
    try:
        text = read_range(path, -max_bytes, max_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def read_range(path: Path, offset: int, max_bytes: int) -> bytes:
    """At most max_bytes from offset on; a negative offset counts from the end. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size + offset) if offset < 0 else min(offset, size))
        return file.read(max_bytes)
