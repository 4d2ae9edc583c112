"""An evaluation's messages wait with nobody: a stage that is faster than the next one waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from varuna._gloo import GlooGroup, connect_group
from varuna.departure import Departure
from varuna.pipeline.engine import Engine, Links, MicroBatch, Position
from varuna.pipeline.transport import Inbox, Outbox
from varuna_planner.schedule import Policy
from waiting import DEADLINE_S

ELEMENTS = 64 * 1024
"""So large that gloo does not keep a message that nobody has asked for."""
N = 30


@dataclass(frozen=True)
class Crossing:
    name: str = "x"
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def shape_for(self, batch: int, /) -> tuple[int, ...]:
        return (batch, ELEMENTS)


class FirstStage:
    on_section: Callable[[int], None] | None = None
    receives = ()
    sends = (Crossing(),)
    is_last = False

    def forward(self, inputs: dict[str, Any], received: list[Tensor], /) -> list[Tensor]:
        return [inputs["x"].expand(1, ELEMENTS).clone()]


class LastStage:
    """Does not begin before the first stage can do no more."""

    on_section: Callable[[int], None] | None = None
    receives = (Crossing(),)
    sends = ()
    is_last = True

    def __init__(self, may_begin: threading.Event) -> None:
        self.may_begin = may_begin

    def forward(self, inputs: dict[str, Any], received: list[Tensor], /) -> Tensor:
        assert self.may_begin.wait(DEADLINE_S)
        return received[0].mean()


class WatchedOutbox(Outbox):
    """Notes how many messages were kept here at most."""

    def __init__(self, *args: Any, may_begin: threading.Event) -> None:
        super().__init__(*args)
        self.most = self.count = 0
        self.may_begin = may_begin

    def send(self, tensors: Sequence[Tensor], micro_batch: int = 0) -> None:
        super().send(tensors, micro_batch)
        self.count += 1
        self.most = max(self.most, self._queued - self._sent)
        if self.count == N:
            self.may_begin.set()

    def wait_for_room(self, most: int) -> None:
        if self._queued - self._sent >= most:
            self.may_begin.set()
        super().wait_for_room(most)


def pair() -> list[GlooGroup]:
    store, limit = HashStore(), timedelta(seconds=DEADLINE_S)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(connect_group, store, rank, 2, address="127.0.0.1", timeout=limit) for rank in range(2)]
        return [future.result() for future in made]


def test_a_stage_that_is_ahead_waits_for_the_next_one() -> None:
    group, may_begin = pair(), threading.Event()
    departures = [Departure(lambda code: None) for _ in range(2)]
    outbox = WatchedOutbox(group[0], 0, 1, departures[0], may_begin=may_begin)
    links = [Links(activations_out=outbox), Links(activations_in=Inbox(group[1], 0, 0, False, departures[1]))]

    def run(stage: int) -> float:
        position = Position(stage=stage, p=2, policy=Policy.ONE_F_ONE_B, run_ahead=0, recompute=False)
        layer = (FirstStage(), LastStage(may_begin))[stage]
        engine = Engine(layer, position, links[stage], torch.device("cpu"), departures[stage])
        batches = [MicroBatch(index, 1, {"x": torch.full((1, 1), float(index))}) for index in range(N)]
        return engine.evaluate(batches, lambda: None).loss_sum

    with ThreadPoolExecutor(2) as pool:
        sums = [future.result(DEADLINE_S) for future in [pool.submit(run, stage) for stage in range(2)]]

    assert sums == [0, sum(range(N))]
    assert outbox.most <= 2
