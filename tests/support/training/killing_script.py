"""`training_script` with a rank that kills itself at a stated point: "kill": {"rank", "at", ...} in its JSON file.

It first waits until all ranks have met. A rank that comes after another has died and rank 0 has left cannot distinguish
a store that is gone from one that is not there yet before its time limit; in a job its agent sends it a command to
leave.

`at` is one of `PHASES`. A phase is found by wrapping a function of the runtime in this process, so the runtime has
no code for tests. "count": the call of that function, from 1. "step", for phases in a training step: the step.
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
import varuna.checkpoint.loading.loader
import varuna.distributed.agreement
import varuna.distributed.groups
import varuna.partition.tracing.trace
from varuna.checkpoint.saving.writer import CheckpointWriter
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.distributed.groups import RankGroup
from varuna.distributed.presence import RankPresence
from varuna.distributed.rendezvous import Rendezvous
from varuna.optim.reduction import GradientReducer
from varuna.pipeline.engine import Engine
from varuna.pipeline.pass_timer import PassTimer
from varuna.pipeline.transport import LinkReceiver, LinkSender
from waiting import wait_until


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Dies at the `count`th call of something, once `step` has begun (0: at any time)."""

    def __init__(self, count: int, step: int) -> None:
        self._count = count
        self._step = step
        self._now = 0
        train = Engine.run_training_pass

        @wraps(train)
        def noting_step(engine: Engine, *args: Any, **named: Any) -> Any:
            self._now = named["step"]
            return train(engine, *args, **named)

        Engine.run_training_pass = noting_step  # type: ignore[method-assign, assignment]

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
        """Dies just before an op, or `after` it has computed and before its result is sent."""
        measure = PassTimer.measure_op

        @contextmanager
        def measure_or_die(timer: PassTimer, name: str, number: int) -> Iterator[None]:
            dies = (name, number) == (op, micro_batch) and self.due()
            if dies and not after:
                die()
            with measure(timer, name, number):
                yield
            if dies:
                die()

        PassTimer.measure_op = measure_or_die  # type: ignore[method-assign, assignment]


def meet_before(*victims: int) -> None:
    """Let every rank count itself once it has joined; the victims go on when all have."""
    join = RankPresence.join_generation

    def join_and_count(rank: int, world_size: int, store: Any, **others: Any) -> RankPresence:
        presence = join(rank, world_size, store, **others)
        store.add("met", 1)
        if rank in victims:
            wait_until(lambda: store.add("met", 0) == world_size, "all ranks")
        return presence

    RankPresence.join_generation = join_and_count  # type: ignore[method-assign, assignment]


def arm(at: str, *, count: int = 1, step: int = 0, op: str = "F", micro_batch: int = 0, after: bool = False) -> None:
    killer = Killer(count, step)
    if at == "op":
        killer.at_op(op, micro_batch, after)
    else:
        PHASES[at](killer)


PHASES: dict[str, Callable[[Killer], None]] = {
    # Building its links.
    "building": lambda killer: killer.at(Rendezvous, "connect_gloo"),
    "built": lambda killer: killer.at(Rendezvous, "connect_gloo", after=True),
    "copying parameters": lambda killer: killer.at(RankGroup, "broadcast_tensors"),
    # In a step.
    "sending": lambda killer: killer.at(LinkSender, "send_message", after=True),
    "receiving": lambda killer: killer.at(LinkReceiver, "take_message"),
    "all-reduce": lambda killer: killer.at(RankGroup, "start_all_reduce", after=True),
    "before the sums": lambda killer: killer.at(GradientReducer, "reduce_gradients"),
    "agreement": lambda killer: killer.at(RankGroup, "all_reduce"),
    "agreed": lambda killer: killer.at(RankGroup, "all_reduce", after=True),
    # Saving and loading.
    "save": lambda killer: killer.at(CheckpointWriter, "start_save"),
    "saving": lambda killer: killer.at(CheckpointStore, "put"),
    "saved": lambda killer: killer.at(CheckpointStore, "put", after=True),
    "loading": lambda killer: killer.at(CheckpointStore, "stream_file"),
    "loaded": lambda killer: killer.at(varuna.checkpoint.loading.loader.StagedCheckpoint, "fill_state", after=True),
}


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())["kill"]
    victim = wanted.pop("rank")
    meet_before(victim)
    if victim == int(os.environ["RANK"]):
        arm(**wanted)
    training_script.main()
