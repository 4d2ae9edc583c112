"""Imports the manager and its planner once, which takes 1.8 s of CPU, then forks one manager after the other.

Each line on standard input is the path of a file that says what to start. For each a supervisor is forked, which forks
the manager, and notes the manager's number and its exit status beside the file. Nothing here starts a thread before
forking. A manager comes back to this module's top level and so begins as `python -m varuna_manager.main` does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from varuna_manager.main import main
from varuna_planner.search.auto_config import warm_up


def serve() -> dict[str, Any] | None:
    """Returns, in each manager, what to start; None at the end of input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            return supervise(Path(line.strip()))
    return None


def supervise(spec: Path) -> dict[str, Any]:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    manager = os.fork()
    if manager == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        document: dict[str, Any] = json.loads(spec.read_text())
        become_manager(document)
        return document
    _write(spec.with_suffix(".pid"), manager)
    _, status = os.waitpid(manager, 0)
    _write(spec.with_suffix(".code"), os.waitstatus_to_exitcode(status))
    os._exit(0)


def become_manager(document: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(document["environ"])
    os.chdir(document["cwd"])
    with Path(document["log"]).open("ab") as log, Path(os.devnull).open("rb") as nothing:
        os.dup2(log.fileno(), 2)
        os.dup2(nothing.fileno(), 0)


def _write(path: Path, number: int) -> None:
    """Nobody reads half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(str(number))
    part.rename(path)


if __name__ == "__main__":
    warm_up()
    gc.freeze()  # no garbage collection of a manager touches the pages that it shares
    started = serve()
    if started is not None:
        sys.exit(main(started["arguments"]))
