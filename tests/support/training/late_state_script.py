"""`training_script`, whose ranks hold up their late state in the second generation: "late" in its JSON file.

It has, each for ranks of the first generation, or of the next one for its new processes: "after_forward": they fetch
the late state when they have run a forward; "never": they fetch it when they have left; "fails": they cannot fetch it;
"sums_after_backward", "sums_after_passes", "sums_never": the same of sums; "dies": it kills itself before its first
forward there, when all ranks have moved; "dies_at_end": after its passes, when all ranks have their late state.
"only_sums": no state is late on any rank; "copies_states": a rank waits in its pass until its copy is whole.

`late.rank*.json` is left by each rank that fills its late state before an update: how many forwards it has run before,
and how many backwards when it fetched its sums.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import copies_script
import training_script
from late_marks import LateMarks
from varuna.checkpoint import CheckpointError
from varuna.pipeline.engine import Engine
from varuna.roles import membership
from varuna.roles.late_state import LateState
from varuna.roles.moving import NewcomerMove, StageMove
from waiting import wait_until


def hold_up(late: dict[str, Any], rank: int, out: Path) -> None:
    marks, ran = LateMarks(out.parent), {"forwards": 0, "backwards": 0, "passes": 0}
    backwards = -1
    fill, wait_for_sums = LateState.fill, LateState.wait_for_sums
    run_forward, run_backward = Engine._run_forward, Engine._run_backward

    def wait_until_left() -> None:
        wait_until(lambda: marks.states[0]._departure.exit_code is not None, "the departure")

    def read_later(kind: type[StageMove | NewcomerMove]) -> None:
        read, read_sums = kind.read_for_update, kind.read_sums

        def read_for_update_later(move: Any) -> Any:
            if rank in late.get("fails", ()):
                raise CheckpointError("it was told to fail")
            if rank in late.get("after_forward", ()):
                wait_until(lambda: ran["forwards"], "a forward")
            if rank in late.get("never", ()):
                wait_until_left()
            return read(move)

        def read_sums_later(move: Any) -> Any:
            nonlocal backwards
            if rank in late.get("sums_after_backward", ()):
                wait_until(lambda: ran["backwards"], "a backward")
            if rank in late.get("sums_after_passes", ()):
                wait_until(lambda: ran["passes"], "the passes")
            if rank in late.get("sums_never", ()):
                wait_until_left()
            backwards = ran["backwards"]
            return read_sums(move)

        kind.read_for_update = read_for_update_later  # type: ignore[method-assign,assignment]
        kind.read_sums = read_sums_later  # type: ignore[method-assign,assignment]

    def count_and_run(engine: Engine, *arguments: Any) -> None:
        if marks.states and rank in late.get("dies", ()):
            marks.wait_until_moved()
            os.kill(os.getpid(), signal.SIGKILL)
        run_forward(engine, *arguments)
        ran["forwards"] += bool(marks.states)

    def run_and_count(engine: Engine, *arguments: Any) -> None:
        run_backward(engine, *arguments)
        ran["backwards"] += bool(marks.states)

    def note_and_wait(state: LateState) -> None:
        ran["passes"] = 1
        wait_for_sums(state)

    def fill_and_note(state: LateState) -> None:
        fill(state)
        if rank in late.get("dies_at_end", ()):
            marks.wait_for_all()
            os.kill(os.getpid(), signal.SIGKILL)
        note = {"forwards": ran["forwards"], "bytes": state.bytes, "backwards_before_sums": backwards}
        (out / f"late.rank{rank}.json").write_text(json.dumps(note))

    if late.get("only_sums"):
        membership.may_be_late = lambda: False
    LateState.fill = fill_and_note  # type: ignore[method-assign,assignment]
    LateState.wait_for_sums = note_and_wait  # type: ignore[method-assign,assignment]
    for kind in (StageMove, NewcomerMove):
        read_later(kind)
    Engine._run_forward = count_and_run  # type: ignore[method-assign,assignment]
    Engine._run_backward = run_and_count  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    hold_up(wanted["late"], int(os.environ["RANK"]), Path(wanted["out"]))
    if wanted["late"].get("copies_states"):
        copies_script.wait_for_copies({})
    training_script.main()
