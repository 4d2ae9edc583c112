"""Ranks that do not go on leave in the middle of a step, too, and others have what their replicas did of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kept_case import LEDGER, STEP, Case, assert_as_if_undisturbed, assert_counted_once, start
from leaving_case import GENERATION_ENDED, assert_rest_is_run, leave_within_step, leaving
from survivor_world import SurvivorWorld
from training_world import Zygote
from varuna_proto.v1 import agent_pb2

SHAPES: list[tuple[tuple[int, int], list[int], tuple[int, int], list[int], dict[str, Any], dict[str, Any]],] = [
    ((2, 2), [3], (2, 1), [0, 1], {}, {}),
    ((1, 3), [1], (2, 1), [2, 0], {"dropout": 0.3, "tied": False}, {}),
    ((2, 2), [0], (3, 1), [1, 3, 2], {"padded": True}, {}),
    ((2, 2), [1], (2, 1), [2, 3], {"offload": True}, {}),
    ((2, 3), [1, 2], (2, 2), [0, 3, 4, 5], {"tied": False, "optimizer": "adamw"}, {}),
    ((2, 2), [0, 3], (2, 1), [2, 1], {}, {}),
    ((2, 2), [2], (1, 3), [3, 0, 1], {"tied": False}, {"variant": "frozen"}),
    ((1, 2), [0], (1, 1), [1], {"padded": True}, {}),
    ((3, 2), [4], (3, 1), [0, 1, 2], {"tied": False}, {"variant": "frozen"}),
]
"""The shape before, the ranks that do not go on, the shape after, the ranks that go on, and what is trained."""
USUAL = [0, 2]


def count_redone(world: SurvivorWorld) -> set[int]:
    return {world.ends[first].list_messages("ready")[-1].ready.micro_batches_redone for first in world.ranks}


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number in USUAL else pytest.mark.slow) for number in range(len(SHAPES))],
)
def test_what_the_replicas_of_leaving_ranks_did_counts(number: int, zygote: Zygote, tmp_path: Path) -> None:
    before, spare, (p, d), ranks, task, wanted = SHAPES[number]
    case = Case(*before, task=task, waits_for_links=True, **leaving(), **wanted)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world, spare=spare)
        left = world.wait_until_left(set())
        assert {(one.exit_code, one.step) for one in left.values()} == {(GENERATION_ENDED, STEP - 1)}
        world.go_on_as(replace(world.plan, p=p, d=d, recompute=()), ranks)
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
        assert "still in use" not in world.logs()
    assert_rest_is_run(world, case)


LONELY: list[tuple[tuple[int, int], list[int], tuple[int, int], list[int], dict[str, Any]]] = [
    ((2, 1), [1], (1, 1), [0], {}),
    ((3, 1), [0], (2, 1), [2, 1], {"tied": False, "optimizer": "adamw"}),
    ((2, 2), [1, 3], (1, 2), [0, 2], {"padded": True}),
    ((3, 1), [0, 1], (1, 1), [2], {"offload": True}),
    ((2, 2), [0, 2], (2, 1), [3, 1], {"dropout": 0.3}),
]
"""As `SHAPES`, where all ranks with a stage leave."""


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number < 1 else pytest.mark.slow) for number in range(len(LONELY))],
)
def test_a_stage_of_which_no_rank_stays_goes_on_in_others(number: int, zygote: Zygote, tmp_path: Path) -> None:
    before, spare, (p, d), ranks, task = LONELY[number]
    case = Case(*before, task=task, **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world, spare=spare)
        left = world.wait_until_left(set())
        assert {(one.exit_code, one.step) for one in left.values()} == {(GENERATION_ENDED, STEP - 1)}
        copied = {copy.rank for rank in ranks for copy in left[rank].copies}
        assert copied == {rank for rank in spare if rank < case.p}
        world.go_on_as(replace(world.plan, p=p, d=d, recompute=()), ranks)
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_rest_is_run(world, case)


@pytest.mark.parametrize(("old", "new"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_every_example_is_counted_once(old: int, new: int, zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 2, micro_batch=old, task={**LEDGER, "global_batch": 25}, variant="ledger", **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world, spare=[2])
        world.wait_until_left(set())
        world.go_on_as(replace(world.plan, p=3, d=1, micro_batch=new, recompute=()), [1, 0, 3])
        assert_counted_once(world.finish(), case)
        assert count_redone(world) == {0}


@pytest.mark.slow
def test_another_loss_before_the_next_shape_has_begun(zygote: Zygote, tmp_path: Path) -> None:
    """What others have left is still there, and is not counted twice."""
    case = Case(2, 3, task={**LEDGER, "global_batch": 25}, variant="ledger", **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world, spare=[0])
        world.wait_until_left(set())
        world.go_on_as(replace(world.plan, d=2, recompute=()), [2, 3, 4, 5], absent={5})
        for rank in (2, 3, 4):
            world.ends[rank].wait_for_number("hello", 2)
            world.ends[rank].send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        world.ends[5].hang_up()
        world.go_on({5})
        assert_counted_once(world.finish(), case)


@pytest.mark.parametrize(
    "parting",
    [pytest.param({"fails": [3]}, id="it is not sent"), pytest.param({"dies": [3]}, id="its VM goes before")],
)
def test_the_share_is_run_again_where_others_do_not_have_it(
    parting: dict[str, Any], zygote: Zygote, tmp_path: Path
) -> None:
    case = Case(2, 2, task=LEDGER, variant="ledger", parting=parting, **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world, spare=[3])
        world.wait_until_left({3})
        world.go_on_as(replace(world.plan, p=2, d=1, recompute=()), [0, 1])
        assert_counted_once(world.finish(), case)
        assert min(count_redone(world)) > 0
