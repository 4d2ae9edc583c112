"""`training_script`, whose ranks are all killed at one step boundary, while the second of their saves is not committed.

Their JSON file has "forever", and an interval that makes a save due at every step boundary. Rank 0 holds the
second save before its manifest; a few steps later every rank kills itself, when all have come to that boundary.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import training_script
from varuna import Varuna
from varuna.checkpoint.format.manifest import MANIFEST
from varuna.checkpoint.storage.store import CheckpointStore
from waiting import wait_until

STEPS_MORE = 4
"""Steps that are trained while the save is held."""


def main() -> None:
    wanted = json.loads(Path(sys.argv[1]).read_text())
    out, counting = Path(wanted["out"]), threading.Lock()
    die_at = out / "die-at"
    commits = itertools.count(1)
    begun = 0
    create, step = CheckpointStore.create, Varuna.step

    def hold_the_second(store: CheckpointStore, path: str, data: bytes) -> bool:
        if path.endswith(MANIFEST) and next(commits) == 2:
            part = die_at.with_suffix(".part")
            with counting:  # no step begins between the count and the file
                part.write_text(str(begun + STEPS_MORE))
                part.rename(die_at)
            threading.Event().wait()
        return create(store, path, data)

    def die_at_step(model: Varuna, *args: Any, **named: Any) -> tuple[float, bool, float]:
        nonlocal begun
        with counting:
            begun += 1
        if die_at.exists() and begun >= int(die_at.read_text()):
            (out / f"at-end{os.environ['RANK']}").touch()
            ranks = range(int(os.environ["WORLD_SIZE"]))
            wait_until(lambda: all((out / f"at-end{rank}").exists() for rank in ranks), "all ranks at the boundary")
            os.kill(os.getpid(), signal.SIGKILL)
        return step(model, *args, **named)

    CheckpointStore.create = hold_the_second  # type: ignore[method-assign, assignment]
    Varuna.step = die_at_step  # type: ignore[method-assign, assignment]
    training_script.main()


if __name__ == "__main__":
    main()
