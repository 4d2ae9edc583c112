"""The flags of the last run in a folder, so that `run_varuna --resume` needs no others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from varuna.launching.layout import LaunchError

__all__ = ["FILE_NAME", "load_last_run", "record_run"]

FILE_NAME = ".varuna_run.json"
"""In the code folder."""

_PATHS = ("machine_list", "env_file")
_KEPT = (
    *_PATHS,
    *("gpus_per_node", "nstages", "batch_size", "chunk_size", "gpus_per_stage", "device", "no_arguments", "python"),
    *("manager_ip", "no_morphing", "training_script", "training_script_args"),
)


def record_run(given: argparse.Namespace, code_dir: Path, checkpoint_url: str) -> None:
    """Records the flags of a run that is about to start. When they cannot be written, the run starts all the same."""
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


def load_last_run(given: argparse.Namespace, code_dir: Path) -> dict[str, Any]:
    """The flags of the last run, as defaults for this one; empty when the last run was of another script.

    Raises LaunchError when the file cannot be read.
    """
    path = code_dir / FILE_NAME
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        script = {name: kept[name] for name in _KEPT}["training_script"]  # raises KeyError when one is missing
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"--resume: {path} cannot be read ({error!r}): remove it and give all flags") from error
    if given.training_script not in (None, script):
        return {}
    if given.manager_ip is not None or given.no_morphing:  # the two together decide where the script runs
        del kept["manager_ip"], kept["no_morphing"]
    return kept
