"""Runs a script that asks for its rank and sizes as arguments, which are made from this worker's environment.

A job's `run` is the same command on every worker, and its shape changes with each generation, so the command is:

    python -m varuna.launching.script train.py --data /data
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import NoReturn

from varuna.launching.layout import LaunchError, make_script_arguments
from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = ["main"]


def main(arguments: list[str]) -> NoReturn:
    """Replaces this process by the script."""
    try:
        command = [sys.executable, "-u", arguments[0], *_read_arguments(), *arguments[1:]]
    except (LaunchError, ValueError) as error:
        sys.exit(f"varuna: {error}")
    os.execv(sys.executable, command)


def _read_arguments() -> list[str]:
    environment = WorkerEnvironment.from_environ(os.environ)
    if environment is None:
        raise LaunchError("this process was not started by a Varuna agent: run the script itself")
    if environment.mode is Mode.CALIBRATE:  # the shape to train in is not known yet, and this one is never trained
        plan = environment.plan
        global_batch = plan.d * max(1, plan.global_batch // plan.d)
        plan = replace(plan, micro_batch=max(1, plan.micro_batch), global_batch=global_batch)
        environment = replace(environment, plan=plan)
    return make_script_arguments(environment, None)


if __name__ == "__main__":
    main(sys.argv[1:])
