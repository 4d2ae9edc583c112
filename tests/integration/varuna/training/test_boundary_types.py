"""Ranks that send their boundaries in bf16 train as those that send them as they are, as nearly as bf16 can."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_gpt import Task
from training_world import Outcome, Ranks, Zygote


def test_boundaries_in_bf16_train_nearly_alike(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(precision="bfloat16", clip=0.5, skip=True, learning_rate=1e-3)

    def run(name: str, options: dict[str, str]) -> Outcome:
        wanted = {"varuna": options}
        with Ranks(zygote, tmp_path / name, task, 3, 1, recompute=(True, False, False), wanted=wanted) as world:
            return world.finish()

    as_made, small = run("as made", {}), run("bf16", {"boundaries": "bf16"})
    assert small.losses == pytest.approx(as_made.losses, rel=2e-2)
    assert small.losses != as_made.losses, "a residual path is rounded"
