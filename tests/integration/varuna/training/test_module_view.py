"""What a script does with its model as a module has plain PyTorch's effect, in every shape and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from module_view_script import BATCH, Model, change, examples
from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote

SCRIPT = TRAINING_SCRIPTS / "module_view_script.py"
STEPS = 7


def train_plainly(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> tuple[list[float], float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(examples(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        change(model, step)
    return losses, model(examples(0)).item()


def run(zygote: Zygote, folder: Path, p: int, d: int, generation: int, **wanted: Any) -> list[dict[str, Any]]:
    wanted |= {"p": p, "shares": [[0, BATCH]] if d == 1 else [[0, 5], [5, BATCH]]}
    url = str(folder / "store")
    task = Task(global_batch=BATCH)
    with Ranks(
        zygote, folder, task, p, d, generation=generation, checkpoint_url=url, wanted=wanted, script=SCRIPT
    ) as world:
        codes = world.exit_codes()
        assert codes == [0] * (p * d), world.logs()
        warned = world.logs().count("has this worker's stage only")
        assert warned == (p * d if p > 1 else 0), "each rank of a model that is cut says once that its part is no whole"
        return [torch.load(world.out / f"rank{rank}.pt") for rank in range(p * d)]


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(2, 1, True), (1, 2, False)], id="2x1-offload-then-1x2"),
        pytest.param([(1, 2, True), (2, 2, False)], id="1x2-offload-then-2x2", marks=pytest.mark.slow),
    ],
)
def test_a_module_in_every_shape(zygote: Zygote, tmp_path: Path, shapes: list[tuple[int, int, bool]]) -> None:
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    bounds = [(1, 4), (5, STEPS)]
    for generation, ((p, d, offload), (first, last)) in enumerate(zip(shapes, bounds, strict=True), start=1):
        ranks = run(zygote, tmp_path, p, d, generation, offload=offload, steps=[first, last])
        if first == 5:
            plain.factor = 1.0  # the script's own number: a new process begins with it again
        losses, evaluated = train_plainly(plain, optimizer, range(first, last + 1))
        expected = plain.state_dict()
        names: set[str] = set()
        drawn: dict[str, torch.Tensor] = {}
        for rank in ranks:
            assert rank["losses"] == pytest.approx(losses, rel=1e-4)
            assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-4)
            for name, tensor in rank["state"].items():
                torch.testing.assert_close(tensor, expected[name], msg=f"{name} in {p}x{d}", rtol=1e-4, atol=1e-5)
            names.update(rank["state"])
            for name, tensor in rank["drawn"].items():
                assert torch.equal(drawn.setdefault(name, tensor), tensor), f"replicas differ in {name} after apply"
        assert names == set(expected)
        whole = ranks[0]["whole"]
        assert list(whole) == list(expected), "every name of the plain model, in its order"
        for name, tensor in whole.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
            assert all(torch.equal(tensor, rank["state"].get(name, tensor)) for rank in ranks)
        assert all(rank["whole"] == {} for rank in ranks[1:])
        assert ("middle" in ranks[0]["modules"]) == (p == 1)
        assert "first" in ranks[0]["modules"]
        assert "first" in ranks[-1]["modules"]  # its weight is tied to the last one's
