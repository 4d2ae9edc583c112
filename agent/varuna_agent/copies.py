"""The folder in which workers keep copies of their checkpoints on this VM, one folder for each job.

The checkpoints themselves are in the job's store: what is deleted here costs reading it from there. All lies in a
folder of this agent's own, `varuna-checkpoints` in what `--checkpoint-dir` names, with a mark in it. What is around
that is somebody else's, whatever its name, and stays.
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
from varuna_agent.isolation import JobUser

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
    def open(cls, base: Path) -> CheckpointCopies:
        """Makes the folder in `base`, or takes the one that an agent has made before.

        Raises CopiesError for a folder that no agent of this user has made, or that another agent uses; OSError.
        """
        folder = base.resolve() / FOLDER
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            _check_owned(folder)
            if not (folder / MARK).exists() and any(folder.iterdir()):
                raise CopiesError(
                    f"--checkpoint-dir {base}: there is a folder {FOLDER} that no Varuna agent has made: "
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
                f"--checkpoint-dir {base}: another agent keeps its copies there: give each agent a folder of its own"
            ) from None
        except OSError:
            os.close(lock)
            raise
        return cls(folder, lock)

    def close(self) -> None:
        """The folder stays, for the next agent."""
        os.close(self._lock)

    def make_folder_for(self, job_id: str, user: JobUser) -> None:
        """The folder of one job, which is nobody else's. Raises OSError."""
        folder = self.folder / job_id
        folder.mkdir(exist_ok=True, mode=0o700)
        user.own(folder)

    def discard_other_jobs(self, job_ids: Collection[str]) -> None:
        """Deletes the copies of all jobs but these. Touches the disk: call it in a thread."""
        try:
            _check_owned(self.folder)
            if not (self.folder / MARK).exists():
                raise CopiesError(f"{self.folder / MARK} is gone")
            others = [job for job in self.folder.iterdir() if job.name != MARK and job.name not in job_ids]
        except FileNotFoundError:
            return
        except (OSError, CopiesError) as error:
            _log.warning("copies of checkpoints stay", folder=str(self.folder), error=str(error))
            return
        for job in others:
            shutil.rmtree(job, ignore_errors=True)


def _check_owned(folder: Path) -> None:
    """Raises CopiesError for a link, a file, or a folder of another user's: it could be made to stand for any other."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise CopiesError(
            f"{folder} is not a folder of the agent's user: move it away, or name another --checkpoint-dir"
        )
