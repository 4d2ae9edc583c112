"""The folder in which workers keep copies of their checkpoints on this VM, one folder for each job.

The checkpoints themselves are in the job's store: what is deleted here costs reading it from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import structlog

from varuna_agent.isolation import JobUser

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def make_folder_for(folder: Path, user: JobUser) -> None:
    """The folder of one job, which is nobody else's. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o711)
    folder.mkdir(exist_ok=True, mode=0o700)
    user.own(folder)


def discard_other_jobs(folder: Path, job_ids: Collection[str]) -> None:
    """Deletes the copies of all jobs but these. Touches the disk: call it in a thread."""
    try:
        others = [job for job in folder.iterdir() if job.name not in job_ids]
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("copies of checkpoints stay", folder=str(folder), error=str(error))
        return
    for job in others:
        shutil.rmtree(job, ignore_errors=True)
