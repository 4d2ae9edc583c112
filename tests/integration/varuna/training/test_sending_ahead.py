"""The state goes to the processes of the next shape while the present one trains, and counts if all leave within the
step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kept_case import STEP, Case, assert_as_if_undisturbed, start
from survivor_world import SurvivorWorld
from training_world import Zygote
from varuna_proto.v1 import agent_pb2

LEAVING: dict[str, Any] = {"leaves_at": {"step": STEP, "op": "F", "generations": 1}}
"""The passes of the step wait before the second forward until their ranks are asked to leave."""
SHAPES: list[tuple[tuple[int, int], tuple[int, int], list[int | None], dict[str, Any]]] = [
    ((2, 1), (2, 2), [0, 1, None, None], {}),
    ((2, 2), (4, 1), [0, 1, 2, 3], {"tied": False, "optimizer": "adamw"}),
    ((1, 1), (1, 2), [0, None], {"optimizer": "adamw"}),
    ((2, 1), (3, 1), [1, None, 0], {"offload": True}),
    ((1, 2), (2, 2), [0, None, None, 1], {"tied": False, "optimizer": "lamb"}),
]
"""Shapes before and after, the ranks that go on, and what is trained."""


def list_ready(world: SurvivorWorld) -> list[Any]:
    """By rank of the present generation: with what it was ready last."""
    return [world.ends[first].list_messages("ready")[-1].ready for first in world.ranks]


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number < 2 else pytest.mark.slow) for number in range(len(SHAPES))],
)
def test_what_was_sent_ahead_need_not_move_when_all_have_left(number: int, zygote: Zygote, tmp_path: Path) -> None:
    before, (p, d), ranks, task = SHAPES[number]
    case = Case(*before, task=task, **LEAVING)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.start_ahead(replace(world.plan, p=p, d=d, recompute=()), ranks)
        world.send_ahead(STEP - 1)
        world.leave_within_step()
        world.grow_ahead()
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
        ready = list_ready(world)
    taken = [one.peer_bytes for one in ready]
    state = max(one.kept_bytes + one.peer_bytes for one in ready)
    assert max(taken) < 0.1 * state, "only what belongs to no section comes after they have left"


@pytest.mark.slow
def test_what_was_sent_of_a_step_that_ended_since_moves_when_all_have_left(zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 1, task={"steps": 20}, op_s=0.05)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.start_ahead(replace(world.plan, d=2, recompute=()), [0, 1, None, None])
        world.ask_to_send_ahead()
        for rank in world.ranks:
            world.ends[rank].wait_for(lambda message: message.HasField("sent_ahead"))
            world.ends[rank].send_leave(agent_pb2.STOP_MODE_HOLD_FIRST, keep_state=True)
        world.grow_ahead()
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
        ready = list_ready(world)
    assert [one.peer_bytes > one.kept_bytes for one in ready] == [False, False, True, True]


@pytest.mark.slow
def test_training_does_not_wait_for_a_process_that_is_gone(zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 1)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.start_ahead(replace(world.plan, d=2, recompute=()), [0, 1, None, None])
        world.ask_to_send_ahead()
        for first in set(world.ends) - set(world.ranks):
            world.ends[first].hang_up()
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
