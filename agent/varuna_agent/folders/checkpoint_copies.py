"""The folder in which workers keep copies of their checkpoints on this VM, one folder for each job.

The checkpoints themselves are in the job's store: after a deletion here, workers read them from there. All copies are
in the agent's own folder, `varuna-checkpoints` in `--checkpoint-dir`, which has a mark in it. The agent touches nothing
outside that folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

import structlog

from varuna_agent.errors import CopiesError
from varuna_agent.workers.isolation import JobUser

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

FOLDER = "varuna-checkpoints"
MARK = ".varuna-agent"
_MARKED = "A Varuna agent keeps copies of checkpoints here, and deletes them.\n"


class CheckpointCopies:
    """The agent's own folder, for as long as the agent runs."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def open_folder(cls, base: Path) -> CheckpointCopies:
        """Make the folder in `base`, or open the one that an earlier agent made.

        Raises CopiesError if no agent of this user made the folder, or if another agent uses it; OSError.
        """
        folder = base.resolve() / FOLDER
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            _check_owned(folder)
            if not (folder / MARK).exists() and any(folder.iterdir()):
                raise CopiesError(
                    f"--checkpoint-dir {base}: its folder {FOLDER} was not made by a Varuna agent: "
                    "move it away, or name another folder"
                ) from None
        lock = os.open(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(lock, _MARKED.encode(), 0)
            folder.chmod(0o711)
        except BlockingIOError:
            os.close(lock)
            raise CopiesError(
                f"--checkpoint-dir {base}: another agent keeps its copies there: give each agent its own folder"
            ) from None
        except OSError:
            os.close(lock)
            raise
        return cls(folder, lock)

    def close(self) -> None:
        """The folder stays, for the next agent."""
        os.close(self._lock)

    def make_folder(self, job_id: str, user: JobUser) -> None:
        """Make the private folder of one job. Raises OSError."""
        folder = self.folder / job_id
        folder.mkdir(exist_ok=True, mode=0o700)
        user.take_path(folder)

    def discard_other_jobs(self, job_ids: Collection[str]) -> None:
        """Delete the copies of all other jobs. Touches the disk: call it in a thread."""
        try:
            _check_owned(self.folder)
            if not (self.folder / MARK).exists():
                raise CopiesError(f"{self.folder / MARK} is gone")
            others = [job for job in self.folder.iterdir() if job.name != MARK and job.name not in job_ids]
        except FileNotFoundError:
            return
        except (OSError, CopiesError) as error:
            _log.warning("copies of checkpoints cannot be deleted", folder=str(self.folder), error=str(error))
            return
        for job in others:
            shutil.rmtree(job, ignore_errors=True)


def _check_owned(folder: Path) -> None:
    """Raises CopiesError for a link, a file, or another user's folder, because these may lead to any other folder."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise CopiesError(
            f"{folder} is not a folder of the agent's user: move it away, or name another --checkpoint-dir"
        )
