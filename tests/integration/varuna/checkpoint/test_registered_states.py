"""An average of the weights, the script's and Varuna's own, and states of each rank, over resumes into other shapes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from registered_states_script import DECAY, TASK
from repository import TRAINING_SCRIPTS
from small_gpt import Examples, make_model, make_optimizer
from training_world import Ranks, Zygote
from varuna.checkpoint.export import export_model
from varuna.data import Batches

SCRIPT = TRAINING_SCRIPTS / "registered_states_script.py"

SHAPES = [(1, 2), (2, 1), (1, 1)]


def train_plainly() -> list[tuple[nn.Module, dict[str, float]]]:
    """By plain PyTorch: after each step the averaged model, and the losses of its batch."""
    model = make_model(TASK)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = make_optimizer(model.parameters(), TASK)
    results: list[tuple[nn.Module, dict[str, float]]] = []
    for _, batch in Batches(Examples(), global_batch=TASK.global_batch, last_step=len(SHAPES), environ={}):
        optimizer.zero_grad()
        model(**batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), TASK.clip or 0)
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            losses = {"average": averaged.module(**batch).item(), "parameters": model(**batch).item()}
        results.append((copy.deepcopy(averaged.module), losses))
    return results


def test_averages_are_plain_pytorchs_in_every_shape(zygote: Zygote, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    for step, ((p, d), (plain, losses)) in enumerate(zip(SHAPES, train_plainly(), strict=True), start=1):
        wanted = {"step": step, "cursor": ""}
        with Ranks(
            zygote, tmp_path, TASK, p, d, generation=step, checkpoint_url=store, wanted=wanted, script=SCRIPT
        ) as world:
            codes = world.exit_codes()
            assert codes == [0] * (p * d), world.logs()
        exported = tmp_path / f"step{step}.safetensors"
        export_model(f"{store}/varuna_ckpt_{step}", exported, ema=True)
        ours = load_file(exported)
        assert ours.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
        for rank in range(p * d):
            of_script = torch.load(world.out / f"rank{rank}.pt")
            for name, value in of_script.items():
                assert torch.equal(ours[name], value), f"{name} is not what PyTorch's own average is"
            assert read_result(world, rank)["evaluated"] == pytest.approx(losses, rel=1e-5)


def read_result(world: Ranks, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((world.out / f"rank{rank}.json").read_text())
    return found


@pytest.mark.slow
def test_a_state_of_each_rank_comes_back_in_its_shape_and_is_refused_in_another(zygote: Zygote, tmp_path: Path) -> None:
    store = str(tmp_path / "store")

    def run(generation: int, p: int, d: int, step: int, per: str = "auto") -> tuple[Ranks, list[int]]:
        wanted = {"step": step, "cursor": per}
        with Ranks(
            zygote, tmp_path, TASK, p, d, generation=generation, checkpoint_url=store, wanted=wanted, script=SCRIPT
        ) as world:
            return world, world.exit_codes()

    world, codes = run(1, 2, 1, step=1)
    assert codes == [0, 0], world.logs()
    assert world.logs().count("the registered state 'cursor' differs between ranks") == 1
    world, codes = run(2, 2, 1, step=2)
    assert codes == [0, 0], world.logs()
    assert [read_result(world, rank)["cursor"] for rank in range(2)] == ["rank 0's", "rank 1's"]
    world, codes = run(3, 1, 2, step=3)
    assert codes == [1, 1]
    assert "step 2 has the registered state 'cursor' of each rank of a 2x1 shape" in world.logs()
    world, codes = run(4, 1, 2, step=3, per="job")
    assert codes == [0, 0], world.logs()
    assert [read_result(world, rank)["cursor"] for rank in range(2)] == ["rank 0's", "rank 0's"]
