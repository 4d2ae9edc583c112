"""A script that drops what it has accumulated drops it on all ranks, also on those that have no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dropping_script import BATCH, EPOCHS, Model, examples
from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote

SCRIPT = TRAINING_SCRIPTS / "dropping_script.py"


@pytest.mark.parametrize(
    ("drop", "offload"),
    [("optimizer", False), ("zeros", False), ("model", True), ("hand", False)],
)
def test_a_frozen_stage_drops_what_the_others_drop(drop: str, offload: bool, zygote: Zygote, tmp_path: Path) -> None:
    wanted = {"drop": drop, "offload": offload}
    store = tmp_path / "store"
    with Ranks(
        zygote,
        tmp_path,
        Task(global_batch=BATCH),
        2,
        1,
        checkpoint_url=str(store),
        script=SCRIPT,
        wanted=wanted,
    ) as world:
        codes = world.exit_codes()
        assert codes == [0, 0], world.logs()
        found = [torch.load(world.out / f"rank{rank}.pt") for rank in range(2)]
    norms, plain = train_plainly()
    for rank in found:
        assert rank["norms"] == pytest.approx(norms, rel=1e-5)
        for name, parameter in rank["parameters"].items():
            torch.testing.assert_close(parameter, plain.get_parameter(name).detach(), msg=name)
    assert any(store.iterdir())


def train_plainly() -> tuple[list[float], Model]:
    """The norms of the means over the steps since the last update or epoch's start, and the model."""
    model = Model()
    optimizer = torch.optim.SGD(model.end.parameters(), lr=0.1, momentum=0.9)
    norms = []
    step = 0
    for length in EPOCHS:
        optimizer.zero_grad()
        for i in range(length):
            step += 1
            model(examples(step)).backward()
            count = i % 2 + 1
            gradients = [p.grad for p in model.end.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)) / count)
            if count == 2:
                for gradient in gradients:
                    gradient /= 2
                optimizer.step()
                optimizer.zero_grad()
    return norms, model
