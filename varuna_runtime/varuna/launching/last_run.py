"""What the last run in a folder was started with, so that `run_varuna --resume` need not be told again."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from varuna.launching.layout import LaunchError

__all__ = ["FILE_NAME", "recall", "remember"]

FILE_NAME = ".varuna_run.json"
"""In the code folder."""

_PATHS = ("machine_list", "env_file")
_KEPT = (
    *_PATHS,
    *("gpus_per_node", "nstages", "batch_size", "chunk_size", "gpus_per_stage", "device", "no_arguments", "python"),
    *("manager_ip", "no_morphing", "training_script", "training_script_args"),
)


def remember(given: argparse.Namespace, code_dir: Path, checkpoint_url: str) -> None:
    """Keeps the flags of a run that is about to start. One that cannot be kept runs all the same."""
    kept: dict[str, Any] = {name: getattr(given, name) for name in _KEPT}
    kept |= {name: str(kept[name].absolute()) for name in _PATHS if kept[name] is not None}
    kept["checkpoint_url"] = checkpoint_url
    path = code_dir / FILE_NAME
    part = path.with_name(f"{FILE_NAME}.{os.getpid()}")
    try:
        part.write_text(json.dumps(kept, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        sys.stderr.write(f"run_varuna: --resume will need all flags again: cannot write {path}: {error.strerror}\n")


def recall(given: argparse.Namespace, code_dir: Path) -> dict[str, Any]:
    """The flags of the last run, as defaults for those of this one; none when that was of another script.

    Raises LaunchError when the file cannot be read.
    """
    path = code_dir / FILE_NAME
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        script = {name: kept[name] for name in _KEPT}["training_script"]  # all are there
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"--resume: {path} cannot be read ({error!r}): remove it and give all flags") from error
    if given.training_script not in (None, script):
        return {}
    if given.manager_ip is not None or given.no_morphing:  # these two say together where it runs
        del kept["manager_ip"], kept["no_morphing"]
    return kept
