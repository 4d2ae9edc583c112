"""Links with several connections: training is the same, and a lost rank is noticed and survived as with one."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from small_gpt import Task, train_plainly
from survivor_world import SurvivorWorld
from training_kills import SCRIPT, N
from training_world import Outcome, Ranks, Zygote, assert_exact
from varuna_proto.environment import EXIT_PEER_LOST

APART: dict[str, Any] = {"hosts_apart": True}


def train(zygote: Zygote, folder: Path, task: Task, connections: int) -> Outcome:
    with Ranks(
        zygote, folder, task, 3, 1, recompute=(True, False, False), link_connections=connections, wanted=APART
    ) as world:
        return world.finish()


@pytest.mark.parametrize("connections", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_is_the_same_to_the_last_bit(zygote: Zygote, tmp_path: Path, connections: int) -> None:
    task = Task(global_batch=7, tied=True, clip=0.5)
    single, several = (train(zygote, tmp_path / str(count), task, count) for count in (1, connections))
    assert several.losses == single.losses
    assert several.norms == single.norms
    for name, value in single.parameters.items():
        assert torch.equal(several.parameters[name], value), name
    assert_exact(several, train_plainly(task), task)


@pytest.mark.parametrize(
    ("victim", "kill"),
    [
        (1, {"at": "sending"}),
        pytest.param(2, {"at": "receiving"}, marks=pytest.mark.slow),
        pytest.param(0, {"at": "op", "op": "B", "micro_batch": 2}, marks=pytest.mark.slow),
    ],
)
def test_all_others_leave_when_a_rank_is_killed(
    zygote: Zygote, tmp_path: Path, victim: int, kill: dict[str, Any]
) -> None:
    wanted = {**APART, "kill": {"rank": victim, "step": 2, **kill}, "forever": True}
    task = Task(global_batch=2 * N)
    with Ranks(zygote, tmp_path, task, 3, 1, link_connections=4, script=SCRIPT, wanted=wanted) as world:
        ends = world.ends()
    assert ends.pop(victim)["code"] == -signal.SIGKILL
    assert [end["code"] for end in ends.values()] == [EXIT_PEER_LOST] * 2, world.logs()
    assert "timed out" not in world.logs()


@pytest.mark.parametrize(
    ("victim", "kill"),
    [
        (3, {"at": "sending"}),
        pytest.param(0, {"at": "receiving"}, marks=pytest.mark.slow),
        pytest.param(1, {"at": "op", "op": "F", "micro_batch": 2}, marks=pytest.mark.slow),
    ],
)
def test_survivors_go_on_in_place(zygote: Zygote, tmp_path: Path, victim: int, kill: dict[str, Any]) -> None:
    task = Task(steps=5, global_batch=4 * N, tied=True, clip=0.5)
    wanted = {**APART, "kill": {"rank": victim, "step": 2, **kill}}
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, link_connections=4, script=SCRIPT, wanted=wanted)
        world.go_on({victim})
        assert_exact(world.finish(), train_plainly(task), task)
