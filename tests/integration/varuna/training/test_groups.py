"""Layer-wise learning rates, several optimizers and frozen stages train as in plain PyTorch, in any shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimizers_script import (
    BATCH,
    CASES,
    Examples,
    make_model,
    make_optimizers,
    make_schedulers,
    options_of,
)
from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.data import Batches

SCRIPT = TRAINING_SCRIPTS / "optimizers_script.py"
SHAPES = [(2, 1), (1, 2), (3, 1), (2, 2), (1, 1)]
STEPS = 2
"""In each shape."""


@dataclass
class Plain:
    """The same training by plain PyTorch, up to the last step made."""

    case: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = make_model(self.case)
        self.optimizers = make_optimizers(self.case, self.model.named_parameters())
        self.schedulers = make_schedulers(self.optimizers)

    def train(self, first: int, last: int) -> None:
        for _, batch in Batches(Examples(), global_batch=BATCH, first_step=first, last_step=last, environ={}):
            self.model.zero_grad()
            loss = self.model(**batch)
            loss.backward()
            self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)))
            self.losses.append(loss.item())
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()

    def assert_equal(self, found: list[dict[str, Any]], what: str) -> None:
        options = options_of(self.model.named_parameters(), self.optimizers, self.schedulers)
        seen = set()
        for rank in found:
            assert rank["losses"] == pytest.approx(self.losses[-STEPS:], rel=1e-5), what
            assert rank["norms"] == pytest.approx(self.norms[-STEPS:], rel=1e-4), what
            for name, parameter in rank["parameters"].items():
                expected = self.model.get_parameter(name)
                torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5, msg=f"{name}: {what}")
            assert rank["options"] == {name: pytest.approx(options[name]) for name in rank["options"]}, what
            seen |= rank["options"].keys()
        assert seen == options.keys()


@pytest.mark.slow
def test_each_shape_goes_on_with_every_parameters_own_options(zygote: Zygote, tmp_path: Path) -> None:
    plains = {case: Plain(case) for case in CASES}
    for turn, (p, d) in enumerate(SHAPES):
        steps = (turn * STEPS + 1, (turn + 1) * STEPS)
        rows = []
        for number, case in enumerate(CASES):
            store = str(tmp_path / "store" / case)
            generation = 1 + turn * len(CASES) + number
            world = Ranks(zygote, tmp_path, Task(global_batch=BATCH), p, d, generation=generation, checkpoint_url=store)
            rows.append({"case": case, "environ": [world.environment(rank).to_environ() for rank in range(p * d)]})
        with Ranks(
            zygote,
            tmp_path / str(turn),
            Task(),
            p,
            d,
            generation=0,
            script=SCRIPT,
            wanted={"rows": rows, "steps": steps},
        ) as world:
            codes = world.exit_codes()
            assert codes == [0] * (p * d), world.logs()
        for case, plain in plains.items():
            plain.train(*steps)
            found = [torch.load(world.out / f"{case}.rank{rank}.pt") for rank in range(p * d)]
            plain.assert_equal(found, f"{case}, {p}x{d}")
