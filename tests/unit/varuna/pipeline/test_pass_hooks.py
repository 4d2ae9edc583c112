"""What a pass calls in its course, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna.distributed.departure import Departure
from varuna.pipeline.engine import Engine
from varuna.pipeline.micro_batches import MicroBatch
from varuna.pipeline.pass_state import PassHooks
from varuna.pipeline.stage_setting import StageLinks, StagePosition
from varuna_planner.schedule.policies import Policy

N = 3


class OnlyStage:
    """Notes its ops: "F", "R" and "B"."""

    receives = ()
    sends = ()
    is_last = True

    def __init__(self, log: list[str], *, recomputes: bool) -> None:
        self.on_section: Callable[[int], None] | None = None
        self._log, self._recomputes = log, recomputes
        self._weight = nn.Parameter(torch.ones(1))
        self._weight.register_hook(lambda _: log.append("B"))  # type: ignore[no-untyped-call]

    def forward(self, inputs: dict[str, Any], received: list[Tensor], /) -> list[Tensor] | Tensor:
        self._log.append("R" if self._recomputes and torch.is_grad_enabled() else "F")
        loss: Tensor = (self._weight * inputs["x"]).mean()
        return loss


def run_pass(*, recomputes: bool) -> list[str]:
    log = list[str]()
    position = StagePosition(stage=0, p=1, policy=Policy.GPIPE, run_ahead=0, recompute=recomputes)
    engine = Engine(
        OnlyStage(log, recomputes=recomputes),
        position=position,
        links=StageLinks(),
        device=torch.device("cpu"),
        departure=Departure(lambda code: None),
    )
    engine.run_training_pass(
        [MicroBatch(number, 1, {"x": torch.ones(1)}) for number in range(N)],
        expected_weight=lambda *_: float(N),
        seed=0,
        step=1,
        hooks=PassHooks(
            before_backward=lambda: log.append("before"),
            before_last_backward=lambda: log.append("before last"),
            after_backward=lambda done, _: log.append(f"after {done}"),
        ),
    )
    return log


@pytest.mark.parametrize("recomputes", [False, True])
def test_before_backward_comes_right_before_each_backward(recomputes: bool) -> None:
    """And before `before_last_backward`, which may add to the sums. No forward or recompute waits for what it does."""
    ahead = ["R"] if recomputes else []
    assert run_pass(recomputes=recomputes) == [
        *["F"] * N,
        *[*ahead, "before", "B", "after 1"],
        *[*ahead, "before", "B", "after 2"],
        *[*ahead, "before", "before last", "B"],
    ]
