"""Models as they come from pip, trained by 2×2 processes as by plain PyTorch; with dropout, as by one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zoo_training
from small_gpt import Task
from training_world import Outcome, Ranks, Zygote, list_results
from zoo_training import GLOBAL_BATCH, MICRO_BATCH, train_plainly

pytestmark = [pytest.mark.xdist_group("zoo"), pytest.mark.slow]  # one process imports transformers

MODELS = ("T5", "Mixtral")
"""An encoder-decoder with tied weights, and experts."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """A zygote with transformers imported: the import takes each rank longer than the training."""
    modules = [f"transformers.models.{name}.modeling_{name}" for name in ("t5", "mixtral")]
    process = Zygote(imports=modules)
    yield process
    process.close()


def run(zygote: Zygote, folder: Path, p: int, d: int, rows: list[tuple[str, bool]]) -> list[Outcome]:
    """The results of training each (model, dropout) in P×D processes, one after the other in the same processes."""
    wanted = []
    for number, (name, dropout) in enumerate(rows, start=1):
        world = Ranks(zygote, folder, Task(global_batch=GLOBAL_BATCH), p, d, micro_batch=MICRO_BATCH, generation=number)
        environ = [world.environment(rank).to_environ() for rank in range(p * d)]
        wanted.append({"model": name, "dropout": dropout, "environ": environ})
    script = Path(zoo_training.__file__)
    with Ranks(zygote, folder, Task(), p, d, generation=0, script=script, wanted={"rows": wanted}) as world:
        codes = world.exit_codes()
        assert codes == [0] * (p * d), f"exit codes {codes}\n{world.logs()}"
    return [Outcome.read(list_results(world.out / str(number), p * d)) for number in range(len(rows))]


def test_processes_train_models_of_the_zoo_as_plain_pytorch_does(zygote: Zygote, tmp_path: Path) -> None:
    dropout = "T5"
    *plain, dropping = run(zygote, tmp_path / "2x2", 2, 2, [*((name, False) for name in MODELS), (dropout, True)])
    (alone,) = run(zygote, tmp_path / "1x1", 1, 1, [(dropout, True)])
    assert dropping.losses != pytest.approx(plain[MODELS.index(dropout)].losses, rel=1e-3), "dropout is on"
    compared = [(dropping, alone.losses, alone.norms, alone.parameters)]
    compared += [(outcome, *train_plainly(name)) for outcome, name in zip(plain, MODELS, strict=True)]
    for outcome, losses, norms, parameters in compared:
        assert outcome.losses == pytest.approx(losses, rel=1e-5)
        assert outcome.norms == pytest.approx(norms, rel=1e-4)
        assert outcome.parameters.keys() == parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-4, atol=2e-6, msg=name)
