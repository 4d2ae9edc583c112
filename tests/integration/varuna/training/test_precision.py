"""fp16 over several ranks: one rank's overflow is everybody's, and the loss scale goes along with checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from small_gpt import Task, train_plainly
from training_world import Ranks, Zygote

FIRST_SCALE = 2.0**10


@pytest.mark.parametrize(
    "rank", [0, pytest.param(3, marks=pytest.mark.slow)]
)  # the first stage of one replica; the last stage of the other
def test_an_overflow_on_one_rank_skips_the_step_on_all(zygote: Zygote, tmp_path: Path, rank: int) -> None:
    task = Task(precision="float16", tied=True, clip=0.5, steps=4)
    store = str(tmp_path / "store")
    wanted = {"overflow": {"rank": rank, "step": 3}, "save": {"step": 3, "url": store}}
    with Ranks(zygote, tmp_path / "faulty", task, 2, 2, recompute=(True, False), wanted=wanted) as world:
        outcome = world.finish()

    for steps in (each["steps"] for each in outcome.ranks):
        assert [step["overflow"] for step in steps] == [False, False, True, False]
        assert [step["next_scale"] for step in steps] == [FIRST_SCALE, FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
        assert [math.isfinite(step["norm"]) for step in steps] == [True, True, False, True]
    expected = train_plainly(task, micro_batch=world.micro_batch, skipped=3)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-4)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-3, atol=1e-4)
        assert outcome.states[name]["step"] == expected.states[name]["step"] == 3

    # Resumed behind the skipped step, in another shape, the last step is the same, with the scale as it was.
    with Ranks(zygote, tmp_path / "resumed", task, 1, 2, generation=2, checkpoint_url=store) as again:
        resumed = again.finish()
    assert [each["first"] for each in resumed.ranks] == [4, 4]
    assert resumed.losses == pytest.approx(outcome.losses[3:], rel=1e-4)
    assert [step["next_scale"] for each in resumed.ranks for step in each["steps"]] == [FIRST_SCALE / 2] * 2
