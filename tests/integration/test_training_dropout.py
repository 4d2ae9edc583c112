"""Dropout draws the same numbers in any shape, and a recomputed forward draws them again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_gpt import Task
from training_world import World, Zygote


def test_dropout_does_not_depend_on_the_shape(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(global_batch=7, dropout=0.2, steps=3)
    with (
        World(zygote, tmp_path / "alone", task, 1, 1) as alone,
        World(zygote, tmp_path / "spread", task, 2, 2, recompute=(True, False)) as spread,
    ):
        one, four = alone.finish(), spread.finish()

    assert four.losses == pytest.approx(one.losses, rel=1e-5)
    for name, value in one.parameters.items():
        torch.testing.assert_close(four.parameters[name], value, rtol=1e-4, atol=2e-5)
