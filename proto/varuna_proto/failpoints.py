"""Places where a test can kill a process.

VARUNA_FAILPOINTS names a folder. A file there arms the failpoint of its name, once: the first process to reach it
deletes the file and sends itself SIGKILL. So a test can arm the manager and agents while they run, and a restarted
process does not die again. Without the variable a failpoint does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

VARIABLE = "VARUNA_FAILPOINTS"


def _make(folder: str) -> Callable[[str], None]:
    if not folder:
        return lambda name: None

    def failpoint(name: str) -> None:
        armed = Path(folder) / name
        try:
            armed.rename(armed.with_name(f"{name}.done"))
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    return failpoint


failpoint = _make(os.environ.get(VARIABLE, ""))
