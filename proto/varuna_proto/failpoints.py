"""Places where a test lets a process die, wait or fail.

VARUNA_FAILPOINTS names a folder. A file there arms the failpoint of its name, once: the first process to come by takes
the file away and does what it says, `kill` (SIGKILL to itself), `sleep SECONDS` or `raise`. So the manager and agents
of a test can be armed while they run, and what is started again does not die again. Without the variable a failpoint
is a function that does nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "VARUNA_FAILPOINTS"


class FailpointError(RuntimeError):
    """What a failpoint raises that was told to."""


def _make(folder: str) -> Callable[[str], None]:
    if not folder:
        return lambda name: None

    def failpoint(name: str) -> None:
        armed = Path(folder) / name
        taken = armed.with_name(f"{name}.{os.getpid()}")
        try:
            armed.rename(taken)
        except FileNotFoundError:
            return
        action, *arguments = taken.read_text().split()
        taken.rename(armed.with_name(f"{name}.done"))
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "sleep":
            time.sleep(float(arguments[0]))
        elif action == "raise":
            raise FailpointError(f"failpoint {name}")
        else:
            raise ValueError(f"failpoint {name}: {action!r} is none of kill, sleep SECONDS, raise")

    return failpoint


failpoint = _make(os.environ.get(VARIABLE, ""))
