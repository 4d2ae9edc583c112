"""`training_script` with a fault inside a step: "fail_at": {"rank", "step", "op", "micro_batch"} in its JSON file.

The rank kills itself just before that op (F, R or B), or half-way through it with "after": true, when the op has
computed but nobody has been told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import training_script
from varuna.pipeline.engine import Engine
from varuna.pipeline.timing import PassTimer


def arm(rank: int, step: int, op: str, micro_batch: int, after: bool = False) -> None:
    """Has this process killed at the op when it is of that rank."""
    if rank != int(os.environ["RANK"]):
        return
    train, measure = Engine.train, PassTimer.measure
    steps: list[int] = []

    def train_noting_step(self: Engine, *args: object, **named: object) -> object:
        steps.append(int(str(named["step"])))
        return train(self, *args, **named)  # type: ignore[arg-type]

    @contextmanager
    def measure_or_die(self: PassTimer, name: str, number: int) -> Iterator[None]:
        dies = (steps[-1:], name, number) == ([step], op, micro_batch)
        if dies and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        with measure(self, name, number):
            yield
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    Engine.train = train_noting_step  # type: ignore[assignment, method-assign]
    PassTimer.measure = measure_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(**json.loads(Path(sys.argv[1]).read_text())["fail_at"])
    training_script.main()
