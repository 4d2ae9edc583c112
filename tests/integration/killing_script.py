"""`training_script`, of which one rank kills itself at a stated point: "kill": {"rank", "at", ...} in its JSON file.

It waits for all ranks to have met first. A rank that comes when another has died already, and rank 0 has left for that,
can tell a store that is gone from one that is not there yet only by its time limit; there the agent tells it to leave.

`at` is one of `PHASES`. A phase is entered by wrapping a function of the runtime in this process, so nothing of it is
there for the tests' sake. "count": at which call of it, from 1. "step", for what is in a training step: in which.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import training_script
import varuna.agreement
import varuna.checkpoint.loading
import varuna.launch
import varuna.partition.trace
from varuna.checkpoint.saving import Checkpointer
from varuna.checkpoint.store import CheckpointStore
from varuna.launch import Group, Rendezvous
from varuna.optim import GradientReducer
from varuna.pipeline.engine import Engine
from varuna.pipeline.timing import PassTimer
from varuna.pipeline.transport import Inbox, Outbox
from varuna.presence import Presence
from waiting import wait_until


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Dies at the `count`th call of something, once `step` has begun (0: at any time)."""

    def __init__(self, count: int, step: int) -> None:
        self._count = count
        self._step = step
        self._now = 0
        train = Engine.train

        @wraps(train)
        def noting_step(engine: Engine, *args: Any, **named: Any) -> Any:
            self._now = named["step"]
            return train(engine, *args, **named)

        Engine.train = noting_step  # type: ignore[method-assign]

    def due(self) -> bool:
        if self._step and self._now != self._step:
            return False
        self._count -= 1
        return self._count == 0

    def at(self, owner: Any, name: str, *, after: bool = False, when: Callable[..., bool] = lambda *_: True) -> None:
        """Dies before, or `after`, a call of `owner.name` for whose arguments `when` holds."""
        function = getattr(owner, name)

        @wraps(function)
        def or_die(*args: Any, **named: Any) -> Any:
            dies = when(*args) and self.due()
            if dies and not after:
                die()
            result = function(*args, **named)
            if dies:
                die()
            return result

        setattr(owner, name, or_die)

    def at_op(self, op: str, micro_batch: int, after: bool) -> None:
        """Just before an op, or `after` it has computed and before anybody is told."""
        measure = PassTimer.measure

        @contextmanager
        def measure_or_die(timer: PassTimer, name: str, number: int) -> Iterator[None]:
            dies = (name, number) == (op, micro_batch) and self.due()
            if dies and not after:
                die()
            with measure(timer, name, number):
                yield
            if dies:
                die()

        PassTimer.measure = measure_or_die  # type: ignore[method-assign]


def meet_before(victim: int) -> None:
    """Let every rank count itself once it has joined; the victim goes on when all have."""
    join = Presence.join

    def join_and_count(rank: int, world_size: int, store: Any, *others: Any) -> Presence:
        presence = join(rank, world_size, store, *others)
        store.add("met", 1)
        if rank == victim:
            wait_until(lambda: store.add("met", 0) == world_size, "all ranks")
        return presence

    Presence.join = join_and_count  # type: ignore[method-assign, assignment]


def arm(at: str, *, count: int = 1, step: int = 0, op: str = "F", micro_batch: int = 0, after: bool = False) -> None:
    killer = Killer(count, step)
    if at == "op":
        killer.at_op(op, micro_batch, after)
    else:
        PHASES[at](killer)


PHASES: dict[str, Callable[[Killer], None]] = {
    # Building its links.
    "building": lambda killer: killer.at(Rendezvous, "gloo"),
    "built": lambda killer: killer.at(Rendezvous, "gloo", after=True),
    "copying parameters": lambda killer: killer.at(Group, "broadcast"),
    # In a step.
    "sending": lambda killer: killer.at(Outbox, "send", after=True),
    "receiving": lambda killer: killer.at(Inbox, "take"),
    "all-reduce": lambda killer: killer.at(Group, "start_all_reduce", after=True),
    "before the sums": lambda killer: killer.at(GradientReducer, "reduce"),
    "agreement": lambda killer: killer.at(Group, "all_reduce"),
    "agreed": lambda killer: killer.at(Group, "all_reduce", after=True),
    # Saving and loading.
    "save": lambda killer: killer.at(Checkpointer, "save"),
    "saving": lambda killer: killer.at(CheckpointStore, "put"),
    "saved": lambda killer: killer.at(CheckpointStore, "put", after=True),
    "loading": lambda killer: killer.at(CheckpointStore, "stream"),
    "loaded": lambda killer: killer.at(varuna.checkpoint.loading.Staged, "apply", after=True),
}


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())["kill"]
    victim = wanted.pop("rank")
    meet_before(victim)
    if victim == int(os.environ["RANK"]):
        arm(**wanted)
    training_script.main()
