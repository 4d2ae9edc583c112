"""`training_script` with copies in each step: a rank waits in its pass until its copy of the step before is whole.

More in its JSON file: "lost": [{"rank", "step", "at"}], ranks that kill themselves in the pass of that step: at
"whole", when their copy is whole; at "all whole", when those of all ranks are; at "half", while it is sent.
"damages": {"rank", "step"}, whose first chunk of the copy of that step is damaged on its first way. "no_room": a rank
without host memory for copies.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import training_script
import varuna.copies.memory
import varuna.copies.owner
import varuna.copies.sending
from killing_script import die
from varuna.copies.owner import CopyOwner
from varuna.pipeline.engine import Engine
from waiting import wait_until

owners: list[CopyOwner] = []
varuna.copies.owner._MOST_WAITING = 1e9  # rounds come as fast as they can


def wait_for_copies(lost: dict[str, Any], note_copied: Callable[[int], None] = lambda step: None) -> None:
    """`note_copied`: is called in a pass of this step when this rank's copy is whole."""
    begin, run = CopyOwner.begin_round, Engine.run_training_pass

    def note_owner(owner: CopyOwner, step: int, state: Any) -> None:
        begin(owner, step, state)
        owners[:] = [owner]

    def run_when_whole(engine: Engine, *args: Any, **named: Any) -> Any:
        for owner in owners:
            wait_until(lambda owner=owner: not owner.is_sending or owner._keeper.is_stopped, "the copy")
        note_copied(named["step"])
        if named["step"] == lost.get("step"):
            die()
        return run(engine, *args, **named)

    CopyOwner.begin_round = note_owner  # type: ignore[method-assign, assignment]
    Engine.run_training_pass = run_when_whole  # type: ignore[method-assign, assignment]


def note_copies(lost: dict[str, Any], out: Path, rank: int) -> Callable[[int], None]:
    """Leaves a file for each copy that is whole; a rank that is lost when all are waits for those of all ranks."""

    def note_copied(step: int) -> None:
        (out / f"rank{rank}.copied{step}").touch()
        if lost.get("at") == "all whole" and step == lost["step"]:
            files = [out / f"rank{other}.copied{step}" for other in range(int(os.environ["WORLD_SIZE"]))]
            wait_until(lambda: all(file.exists() for file in files), "the copies of all ranks")

    return note_copied


def watch_chunks(lost: dict[str, Any], damaged_step: int | None) -> None:
    send_copy, send_chunk = CopyOwner._send_copy, varuna.copies.sending.send_chunk
    now = {"step": 0, "chunks": 0, "damages": damaged_step}

    def note_step(owner: CopyOwner, held: Any, series: int) -> None:
        now.update(step=held.inventory.step, chunks=0)
        send_copy(owner, held, series)

    def send_or_fail(connection: Any, chunk: Any) -> int:
        now["chunks"] += 1
        if lost.get("at") == "half" and now["step"] == lost["step"] - 1 and now["chunks"] == 2:
            die()
        if now["step"] == now["damages"]:
            now["damages"] = None
            size = send_chunk(Harming(connection), chunk)
        else:
            size = send_chunk(connection, chunk)
        return size

    CopyOwner._send_copy = note_step  # type: ignore[method-assign, assignment]
    varuna.copies.sending.send_chunk = send_or_fail


class Harming:
    """A connection that changes one bit of the last byte."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def sendmsg(self, parts: Any) -> int:
        data = bytearray(b"".join(parts))
        data[-1] ^= 1
        self._connection.sendall(data)
        return len(data)


def main() -> None:
    wanted = json.loads(Path(sys.argv[1]).read_text())
    own = int(os.environ["RANK"])
    lost: dict[str, Any] = next((one for one in wanted.get("lost", []) if one["rank"] == own), {})
    damages = wanted.get("damages", {})
    if wanted.get("no_room") == own:
        varuna.copies.memory.count_available_bytes = lambda: 1  # type: ignore[assignment]
    wait_for_copies(lost if lost.get("at") != "half" else {}, note_copies(lost, Path(wanted["out"]), own))
    watch_chunks(lost, damages["step"] if damages.get("rank") == own else None)
    training_script.main()


if __name__ == "__main__":
    main()
