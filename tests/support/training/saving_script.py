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
from varuna.checkpoint.saving.writer import CheckpointWriter
from varuna.pipeline.engine import Engine
from waiting import wait_until


def copy_in_passes(note: Path) -> None:
    forwards = before = 0
    start, make, run_forward = CheckpointWriter.start_save, writer.make_snapshot, Engine._run_forward

    def run_and_count(engine: Engine, *arguments: Any) -> None:
        nonlocal forwards
        forwards += 1
        run_forward(engine, *arguments)

    def note_and_start(of: CheckpointWriter, *arguments: Any, **more: Any) -> bool:
        nonlocal before
        before = forwards  # the thread may begin when all forwards have run
        return start(of, *arguments, **more)

    def wait_and_make(*arguments: Any, **more: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "training would wait for the copy"
        wait_until(lambda: forwards > before, "a forward")
        note.touch()
        return make(*arguments, **more)

    writer.make_snapshot = wait_and_make  # type: ignore[assignment]
    CheckpointWriter.start_save = note_and_start  # type: ignore[method-assign,assignment]
    Engine._run_forward = run_and_count  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    copy_in_passes(Path(wanted["out"]) / f"beside.rank{os.environ['RANK']}")
    training_script.main()
