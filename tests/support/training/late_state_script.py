"""`training_script`, whose ranks hold up their late state in the second generation: "late" in its JSON file.

It has, each for ranks of the first generation: "after_forward": they fetch when they have run a forward; "never": they
fetch when they have left; "fails": they cannot fetch; "dies": it kills itself before its first forward there;
"dies_at_end": after its passes, when all ranks have their late state.

`late.rank*.json` is left by each rank that fills its late state before an update: how many forwards it has run before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import training_script
from late_marks import LateMarks
from varuna.checkpoint import CheckpointError
from varuna.pipeline.engine import Engine
from varuna.roles.late_state import LateState
from varuna.roles.moving import StageMove
from waiting import wait_until


def hold_up(late: dict[str, Any], rank: int, out: Path) -> None:
    marks, forwards = LateMarks(out, rank), 0
    fill, read, run_forward = LateState.fill, StageMove.read_for_update, Engine._run_forward

    def read_later(move: StageMove) -> Any:
        if rank in late.get("fails", ()):
            raise CheckpointError("it was told to fail")
        if rank in late.get("after_forward", ()):
            wait_until(lambda: forwards, "a forward")
        if rank in late.get("never", ()):
            wait_until(lambda: marks.states[0]._departure.exit_code is not None, "the departure")
        return read(move)

    def count_and_run(engine: Engine, *arguments: Any) -> None:
        nonlocal forwards
        if marks.states and rank in late.get("dies", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        run_forward(engine, *arguments)
        forwards += bool(marks.states)

    def fill_and_note(state: LateState) -> None:
        fill(state)
        if rank in late.get("dies_at_end", ()):
            marks.wait_for_all()
            os.kill(os.getpid(), signal.SIGKILL)
        (out / f"late.rank{rank}.json").write_text(json.dumps({"forwards": forwards, "bytes": state.bytes}))

    LateState.fill = fill_and_note  # type: ignore[method-assign,assignment]
    StageMove.read_for_update = read_later  # type: ignore[method-assign,assignment]
    Engine._run_forward = count_and_run  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    hold_up(wanted["late"], int(os.environ["RANK"]), Path(wanted["out"]))
    training_script.main()
