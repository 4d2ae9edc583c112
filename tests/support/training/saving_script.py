"""`training_script`, whose automatic checkpoints copy the state when a forward of the next step has begun.

`beside.rank*` is left by each rank that has copied one so.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import training_script
from varuna.checkpoint.saving import writer
from varuna.pipeline.engine import Engine
from waiting import wait_until


def copy_in_passes(note: Path) -> None:
    forwards = 0
    make, run_forward = writer.make_snapshot, Engine._run_forward

    def run_and_count(engine: Engine, *arguments: Any) -> None:
        nonlocal forwards
        forwards += 1
        run_forward(engine, *arguments)

    def wait_and_make(*arguments: Any, **more: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "training would wait for the copy"
        before = forwards
        wait_until(lambda: forwards > before, "a forward")
        note.touch()
        return make(*arguments, **more)

    writer.make_snapshot = wait_and_make  # type: ignore[assignment]
    Engine._run_forward = run_and_count  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    copy_in_passes(Path(wanted["out"]) / f"beside.rank{os.environ['RANK']}")
    training_script.main()
