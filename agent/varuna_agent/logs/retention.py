"""Keeps the logs of workers, of setups and of the agent itself from filling the VM's disk.

The writer of a log holds it open, and readers count bytes from its beginning. So a log that has grown too long keeps
its name and its offsets: the disk space of its older half is freed, as a hole in the file. The logs of generations that
are over are deleted as a whole, the oldest first. All functions touch the disk: call them in a thread.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_KEEP_SIZE_AND_PUNCH_HOLE = 3
_BLOCK_BYTES = 512
"""Of `st_blocks`."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class LogSizes:
    each_bytes: int
    """Limit for one log."""
    old_bytes: int
    """Limit for all logs of past generations together."""


def keep_logs_small(vm_dir: Path, running: Collection[tuple[str, int]], sizes: LogSizes) -> None:
    """`running`: the generations that have workers here, by job and number."""
    own_output = 2
    with suppress(OSError):
        trim_descriptor(own_output, sizes.each_bytes)
    folders = [vm_dir / "jobs" / job_id / f"g{generation}" for job_id, generation in running]
    for log in (*_logs_in(folders), *vm_dir.glob("jobs/*/*.log"), *vm_dir.glob("workdirs/*/*.log")):
        try:
            trim_log(log, sizes.each_bytes)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("a log cannot be trimmed", path=str(log), error=str(error))
    discard_old_logs(vm_dir / "jobs", folders, sizes.old_bytes)


def trim_log(path: Path, most_bytes: int) -> None:
    """Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        trim_descriptor(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def trim_descriptor(descriptor: int, most_bytes: int) -> None:
    """Free all but the newest half of `most_bytes` of a file that takes more than `most_bytes`. Raises OSError.

    On a file system without holes, the file is emptied, because its writers append.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_blocks * _BLOCK_BYTES <= most_bytes:
        return
    length = (found.st_size - most_bytes // 2) // _PAGE_BYTES * _PAGE_BYTES
    if length > 0 and not _punch_hole(descriptor, length):
        os.ftruncate(descriptor, 0)


def discard_old_logs(jobs: Path, running: Collection[Path], most_bytes: int) -> None:
    """Delete the folders of past generations, the oldest first, until the rest takes at most `most_bytes`."""
    over = [folder for folder in jobs.glob("*/g*") if folder not in running]
    total = 0
    for written_at, taken, folder in sorted((_measure_folder(folder) for folder in over), reverse=True):
        total += taken
        if total > most_bytes:
            _log.info("old logs are deleted", folder=str(folder), bytes=taken, written_at=written_at)
            shutil.rmtree(folder, ignore_errors=True)
            if next(folder.parent.glob("g*"), None) is None:
                shutil.rmtree(folder.parent, ignore_errors=True)


def _logs_in(folders: Collection[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from folder.glob("rank*.log")


def _measure_folder(folder: Path) -> tuple[float, int, Path]:
    """The time of its last write, its bytes on the disk, and the folder itself."""
    written_at, taken = 0.0, _PAGE_BYTES
    for log in folder.glob("*"):
        with suppress(OSError):
            found = log.lstat()
            written_at, taken = max(written_at, found.st_mtime), taken + found.st_blocks * _BLOCK_BYTES
    return written_at, taken, folder


def _punch_hole(descriptor: int, length: int) -> bool:
    """Free the file's beginning. False: the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    punch = ctypes.CDLL(None).fallocate
    punch.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(punch(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, 0, length) == 0)
