"""The folder in which workers keep copies of their checkpoints on this VM, one folder for each job.

The checkpoints themselves are in the job's store: what is deleted here costs reading it from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import structlog

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


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
