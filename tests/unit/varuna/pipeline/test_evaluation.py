"""An evaluation's messages pile up nowhere: a stage that is faster than the next one waits for it."""

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

from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup, connect_group
from varuna.distributed.link_connections import GlooConnection
from varuna.pipeline.engine import Engine
from varuna.pipeline.micro_batches import MicroBatch
from varuna.pipeline.stage_setting import StageLinks, StagePosition
from varuna.pipeline.transport import LinkReceiver, LinkSender
from varuna_planner.schedule.policies import Policy
from waiting import DEADLINE_S

ELEMENTS = 64 * 1024
"""So large that gloo does not keep a message for which no receive is posted."""
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
    """Begins only when the first stage can do nothing more."""

    on_section: Callable[[int], None] | None = None
    receives = (Crossing(),)
    sends = ()
    is_last = True

    def __init__(self, may_begin: threading.Event) -> None:
        self.may_begin = may_begin

    def forward(self, inputs: dict[str, Any], received: list[Tensor], /) -> Tensor:
        assert self.may_begin.wait(DEADLINE_S)
        return received[0].mean()


class WatchedSender(LinkSender):
    """Records the most messages that were kept here."""

    def __init__(self, *args: Any, may_begin: threading.Event, **named: Any) -> None:
        super().__init__(*args, **named)
        self.most = self.count = 0
        self.may_begin = may_begin

    def send_message(self, tensors: Sequence[Tensor], micro_batch: int = 0) -> None:
        super().send_message(tensors, micro_batch)
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
    sender = WatchedSender(GlooConnection(group[0], 1), peer=0, departure=departures[0], may_begin=may_begin)
    links = [
        StageLinks(activations_out=sender),
        StageLinks(
            activations_in=LinkReceiver(GlooConnection(group[1], 0), peer=0, pinned=False, departure=departures[1])
        ),
    ]

    def run(stage: int) -> float:
        position = StagePosition(stage=stage, p=2, policy=Policy.ONE_F_ONE_B, run_ahead=0, recompute=False)
        layer = (FirstStage(), LastStage(may_begin))[stage]
        engine = Engine(
            layer, position=position, links=links[stage], device=torch.device("cpu"), departure=departures[stage]
        )
        batches = [MicroBatch(index, 1, {"x": torch.full((1, 1), float(index))}) for index in range(N)]
        return engine.run_evaluation_pass(batches, lambda: None, seed=0, step=0).loss_sum

    with ThreadPoolExecutor(2) as pool:
        sums = [future.result(DEADLINE_S) for future in [pool.submit(run, stage) for stage in range(2)]]

    assert sums == [0, sum(range(N))]
    assert sender.most <= 2
