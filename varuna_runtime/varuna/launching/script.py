"""Runs a script with the arguments that the seeds' scripts ask for, made from this worker's environment.

A job's `run` is the same command on every worker, and its shape changes while it runs; this stands between:

    python -m varuna.launching.script train.py --data /data
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import NoReturn

from varuna.launching.layout import LaunchError, script_arguments
from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = ["main"]


def main(arguments: list[str]) -> NoReturn:
    """Becomes the script."""
    try:
        command = [sys.executable, "-u", arguments[0], *_passed(), *arguments[1:]]
    except (LaunchError, ValueError) as error:
        sys.exit(f"varuna: {error}")
    os.execv(sys.executable, command)


def _passed() -> list[str]:
    environment = WorkerEnvironment.from_environ(os.environ)
    if environment is None:
        raise LaunchError("this process was not started by a Varuna agent: run the script itself")
    if environment.mode is Mode.CALIBRATE:  # the shape that will train is still to be found; this one is never trained
        environment = replace(
            environment,
            micro_batch=max(1, environment.micro_batch),
            global_batch=environment.d * max(1, environment.global_batch // environment.d),
        )
    return script_arguments(environment, None)


if __name__ == "__main__":
    main(sys.argv[1:])
