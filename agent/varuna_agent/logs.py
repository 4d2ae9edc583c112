"""The log files of ranks. All functions touch the disk: call them in a thread."""

from __future__ import annotations

import os
from pathlib import Path

from varuna_agent.state import WorkerKey


def log_path(vm_dir: Path, key: WorkerKey) -> Path:
    return vm_dir / "jobs" / key.job_id / f"g{key.generation}" / f"rank{key.rank}.log"


def open_log(path: Path) -> int:
    """A file descriptor that appends; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


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
