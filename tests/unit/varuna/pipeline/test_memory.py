"""The stages of a pipeline as threads of one process: the buffers that the engine keeps, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup, connect_group
from varuna.distributed.link_connections import GlooConnection
from varuna.pipeline.engine import Engine
from varuna.pipeline.micro_batches import MicroBatch
from varuna.pipeline.stage_setting import StageLinks, StagePosition
from varuna.pipeline.transport import LinkReceiver, LinkSender, MessageTensor
from varuna_planner.schedule.policies import Policy, stash_cap
from waiting import DEADLINE_S

WIDTH = 8
LIMIT = timedelta(seconds=DEADLINE_S)


@dataclass(frozen=True)
class Crossing:
    """What goes from stage to stage."""

    name: str = "x"
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def shape_for(self, batch: int, /) -> tuple[int, ...]:
        return (batch, WIDTH)


class Layer:
    """One stage."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        self.on_section: Callable[[int], None] | None = None
        self.receives = () if is_first else (Crossing(),)
        self.sends = () if is_last else (Crossing(),)
        self.is_last = is_last
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: dict[str, Any], received: list[Tensor], /) -> list[Tensor] | Tensor:
        x = self.weight * (received[0] if received else inputs["x"])
        return x.mean() if self.is_last else [x]


class CountingReceiver(LinkReceiver):
    """Records for how many messages there is room."""

    posted = 0

    def post_receive(self, specs: Sequence[MessageTensor], micro_batch: int = 0) -> None:
        self.posted += 1
        super().post_receive(specs, micro_batch)


class WatchedEngine(Engine):
    """Checks around every forward and backward how much room is taken."""

    check: Callable[[int], None]

    def _run_forward(self, run: Any, *args: Any) -> None:
        self.check(run.backwards)
        super()._run_forward(run, *args)
        self.check(run.backwards)

    def _run_backward(self, run: Any, *args: Any) -> None:
        self.check(run.backwards)
        super()._run_backward(run, *args)
        self.check(run.backwards)


def pair() -> list[GlooGroup]:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(connect_group, store, rank, 2, address="127.0.0.1", timeout=LIMIT) for rank in range(2)]
        return [future.result() for future in made]


@pytest.mark.parametrize(
    ("policy", "run_ahead"), [*((policy, 0) for policy in Policy if policy.executable), (Policy.WORK_CONSERVING, 2)]
)
def test_a_stage_never_has_more_buffers_than_its_stash_allows(policy: Policy, run_ahead: int) -> None:
    p, n = 3, 9
    down, up = [pair() for _ in range(p - 1)], [pair() for _ in range(p - 1)]

    def run(stage: int) -> None:
        departure = Departure(lambda code: None)
        ends: dict[str, Any] = {"peer": 0, "departure": departure}
        activations = gradients = activations_out = gradients_out = None
        if stage > 0:
            activations = CountingReceiver(GlooConnection(down[stage - 1][1], 0), pinned=False, **ends)
            gradients_out = LinkSender(GlooConnection(up[stage - 1][1], 0), **ends)
        if stage < p - 1:
            gradients = CountingReceiver(GlooConnection(up[stage][0], 1), pinned=False, **ends)
            activations_out = LinkSender(GlooConnection(down[stage][0], 1), **ends)
        links = StageLinks(
            activations_in=activations,
            gradients_out=gradients_out,
            activations_out=activations_out,
            gradients_in=gradients,
        )
        layer = Layer(stage == 0, stage == p - 1)
        position = StagePosition(stage=stage, p=p, policy=policy, run_ahead=run_ahead, recompute=stage < p - 1)
        engine = WatchedEngine(layer, position=position, links=links, device=torch.device("cpu"), departure=departure)
        cap = stash_cap(policy.code, stage, p, n, run_ahead)

        def check(backwards: int) -> None:
            # One more activation: it comes while all others are in flight.
            assert activations is None or activations.posted == min(n, cap + 1 + backwards)
            assert gradients is None or gradients.posted - backwards <= cap

        engine.check = check
        batches = [MicroBatch(index, 2, {"x": torch.full((2, WIDTH), float(index))}) for index in range(n)]
        result = engine.run_training_pass(batches, expected_weight=lambda *_: 2 * n, seed=0, step=1)
        gradient = layer.weight.grad
        assert gradient is not None
        torch.testing.assert_close(gradient, torch.full((WIDTH,), sum(range(n)) / n / WIDTH))
        if layer.is_last:
            assert result.loss_sum == pytest.approx(2 * sum(range(n)))

    with ThreadPoolExecutor(p) as pool:
        for future in [pool.submit(run, stage) for stage in range(p)]:
            future.result(timeout=DEADLINE_S)
