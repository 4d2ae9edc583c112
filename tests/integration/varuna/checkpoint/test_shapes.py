"""A checkpoint of any shape is loaded in any other: one training, each step in another shape than the one before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.checkpoint import read_manifest

SHAPES = [(2, 1), (1, 3), (4, 1), (2, 2), (1, 1), (3, 2)]
TASK = Task(global_batch=10, steps=len(SHAPES), tied=True, dropout=0.1, clip=0.5)


@pytest.mark.slow
def test_each_step_in_another_shape_gives_the_uninterrupted_training(zygote: Zygote, tmp_path: Path) -> None:
    with Ranks(zygote, tmp_path / "uninterrupted", TASK, 1, 1) as world:
        expected = world.finish()

    url = str(tmp_path / "store")
    losses: list[float] = []
    for step, (p, d) in enumerate(SHAPES, start=1):
        saving = {"save": {"step": step, "url": url}}
        task = replace(TASK, steps=step)
        with Ranks(zygote, tmp_path, task, p, d, generation=step, checkpoint_url=url, wanted=saving) as world:
            outcome = world.finish()
        assert [rank["first"] for rank in outcome.ranks] == [step] * (p * d)
        assert (read_manifest(url, step).p, read_manifest(url, step).d) == (p, d)
        losses += outcome.losses

    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert outcome.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-4, atol=2e-5)
        for key, kept in expected.states[name].items():
            torch.testing.assert_close(outcome.states[name][key], kept, rtol=1e-3, atol=1e-6)
