"""Training in a shape P×D is the single-process training, to rounding, and so is evaluation.

`test_training_matrix.py` has every shape; this file has what is the same in all its rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from small_gpt import Task, Trained, train_plainly
from training_world import Outcome, Ranks, Zygote


def assert_same_training(outcome: Outcome, expected: Trained) -> None:
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    assert outcome.norms == pytest.approx(expected.norms, rel=1e-4)
    assert [rank["evaluated"] for rank in outcome.ranks] == pytest.approx(
        [expected.evaluated] * len(outcome.ranks), rel=1e-5
    )
    assert outcome.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        torch.testing.assert_close(
            outcome.parameters[name], value, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("p", "d", "task", "options"),
    [
        pytest.param(1, 1, Task(tied=True, clip=0.5), {"micro_batch": 3}, id="1x1"),
        pytest.param(1, 2, Task(global_batch=10), {"micro_batch": 3, "recompute": (True,)}, id="1x2-smaller-last"),
        pytest.param(
            2,
            2,
            Task(global_batch=7, clip=0.5, tied=True, declared=True),
            {"policy": "1f1b"},
            id="2x2-uneven-declared",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, 3, Task(global_batch=10, tied=True, clip=0.5), {"run_ahead": 1}, id="2x3-uneven-tied-clipped"),
    ],
)
def test_any_shape_trains_as_one_process_does(
    zygote: Zygote, tmp_path: Path, p: int, d: int, task: Task, options: dict[str, Any]
) -> None:
    with Ranks(zygote, tmp_path, task, p, d, **options) as world:
        outcome = world.finish()

    assert_same_training(outcome, train_plainly(task))


@pytest.mark.slow
def test_cut_points_that_varuna_finds_train_as_one_process_does(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(global_batch=7, clip=0.5, tied=True)
    with Ranks(zygote, tmp_path, task, 3, 2, wanted={"cut_points": 3}, recompute=(True, True, False)) as world:
        outcome = world.finish()

    assert_same_training(outcome, train_plainly(task))
