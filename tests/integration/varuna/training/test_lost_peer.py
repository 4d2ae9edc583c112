"""A rank that dies: every other rank leaves soon, and a new generation goes on from the checkpoint in another shape."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from small_gpt import Task, train_plainly
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST


@pytest.mark.parametrize(("p", "d", "victim"), [pytest.param(4, 1, 3, marks=pytest.mark.slow), (1, 3, 1)])
def test_all_survivors_leave_when_a_rank_is_killed(zygote: Zygote, tmp_path: Path, p: int, d: int, victim: int) -> None:
    dying = {"die": {"rank": victim, "step": 3}, "forever": True}
    with Ranks(zygote, tmp_path, Task(), p, d, wanted=dying) as world:
        ends = world.ends()

    assert ends.pop(victim)["code"] == -signal.SIGKILL
    assert [end["code"] for end in ends.values()] == [EXIT_PEER_LOST] * (p * d - 1), world.logs()
    assert "timed out" not in world.logs()


@pytest.mark.slow
def test_training_goes_on_in_another_shape_from_the_checkpoint(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(global_batch=7, tied=True, clip=0.5, steps=5)
    store = str(tmp_path / "store")
    expected = train_plainly(task)
    dying = {"die": {"rank": 2, "step": 4}, "save": {"step": 2, "url": store}}
    with Ranks(zygote, tmp_path, task, 2, 2, wanted=dying) as world:
        assert sorted(world.exit_codes()) == [-signal.SIGKILL, EXIT_PEER_LOST, EXIT_PEER_LOST, EXIT_PEER_LOST]

    with Ranks(zygote, tmp_path, task, 3, 1, generation=2, checkpoint_url=store) as second:
        outcome = second.finish()

    assert {rank["first"] for rank in outcome.ranks} == {3}
    assert outcome.losses == pytest.approx(expected.losses[2:], rel=1e-5)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-4, atol=2e-5)
