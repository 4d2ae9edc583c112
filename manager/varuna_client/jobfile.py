"""Job files: YAML in, the job's document for the manager out."""

from __future__ import annotations

from pathlib import Path

import yaml

from varuna_client.documents import JobSpec
from varuna_client.errors import UserError

KEYS = (
    "name",
    "workdir",
    "run",
    "global_batch",
    "resources",
    "checkpoint",
    "env",
    "plan",
    "profile_only",
    "max_restarts_on_errors",
    "priority",
)
"""What a job file may say; the manager checks the values."""


def load_job(path: Path) -> JobSpec:
    """The job that a file describes. Its `workdir` counts from the file's folder, which is also the default.

    Raises UserError, in one line, for a file that is missing, not YAML, or says something unknown.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"cannot read job file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"job file {path} is not text: give a YAML file with at least run and global_batch") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"job file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UserError(f"job file {path}: expected 'key: value' lines with at least run and global_batch")
    unknown = sorted(str(key) for key in document if key not in KEYS)
    if unknown:
        raise UserError(f"job file {path}: unknown {', '.join(unknown)}; it may say {', '.join(KEYS)}")
    folder = path.resolve().parent
    workdir = folder / str(document.get("workdir") or "")
    if not workdir.is_dir():
        raise UserError(f"job file {path}: workdir {workdir} is not a folder")
    return {"name": folder.name, **document, "workdir": str(workdir.resolve())}
