"""What a model draws is the same in any shape and for any size of the micro-batches, and a recompute draws it again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import random_script
from small_gpt import Task
from training_world import Ranks, Zygote

SCRIPT = Path(random_script.__file__)


def test_dropout_does_not_depend_on_the_shape(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(global_batch=7, dropout=0.2, steps=3)
    with (
        Ranks(zygote, tmp_path / "alone", task, 1, 1, micro_batch=7) as alone,
        Ranks(zygote, tmp_path / "spread", task, 2, 2, recompute=(True, False)) as spread,
    ):
        one, four = alone.finish(), spread.finish()

    assert four.losses == pytest.approx(one.losses, rel=1e-5)
    for name, value in one.parameters.items():
        torch.testing.assert_close(four.parameters[name], value, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_random_numbers_belong_to_examples(zygote: Zygote, tmp_path: Path) -> None:
    """Dropout of several kinds, in attention too, stochastic depth, and noise in evaluations; the last micro-batch is a
    smaller one."""
    task = Task(global_batch=11, steps=4)
    uninterrupted = random_script.train(task.global_batch, task.steps)
    assert len(set(uninterrupted)) == 3 * task.steps
    in_chunks = random_script.train(task.global_batch, task.steps, batch_size=task.global_batch, chunk_size=8)
    assert in_chunks == pytest.approx(uninterrupted, rel=1e-5)

    store = f"file://{tmp_path / 'store'}"

    def world(folder: str, p: int, d: int, m: int, *recompute: bool, until: int = 4, **options: Any) -> Ranks:
        wanted = {"save": {"step": 2, "url": store}} if until == 2 else {}
        steps = replace(task, steps=until)
        return Ranks(
            zygote,
            tmp_path / folder,
            steps,
            p,
            d,
            micro_batch=m,
            recompute=recompute,
            script=SCRIPT,
            wanted=wanted,
            **options,
        )

    def losses(ended: Ranks) -> list[float]:
        assert set(ended.exit_codes()) == {0}, ended.logs()
        found = [json.loads(path.read_text()) for path in ended.out.glob("losses*.json")]
        assert len(found) == ended.p * ended.d
        assert all(each == found[0] for each in found)
        return found[0]

    with (
        world("alone", 1, 1, 8) as alone,
        world("spread", 2, 2, 1, True, False) as spread,
        world("begun", 2, 1, 3, True, True, until=2, checkpoint_url=store) as begun,
    ):
        assert losses(alone) == pytest.approx(uninterrupted, rel=1e-5)
        assert losses(spread) == pytest.approx(uninterrupted, rel=1e-5)
        assert losses(begun) == pytest.approx(uninterrupted[:6], rel=1e-5)
    with world("resumed", 1, 2, 2, checkpoint_url=store, generation=2) as resumed:
        assert losses(resumed) == pytest.approx(uninterrupted[6:], rel=1e-5)
