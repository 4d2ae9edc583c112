"""All ranks leave in the middle of a step, with what they have of it, and the next shape runs only the rest."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kept_case import LEDGER, STEP, Case, assert_as_if_undisturbed, assert_counted_once, op_kill, start
from leaving_case import GENERATION_ENDED, assert_rest_is_run, leave_within_step, leaving
from survivor_world import SurvivorWorld
from training_world import Zygote

SHAPES: list[tuple[tuple[int, int], tuple[int, int], list[int | None], dict[str, Any], dict[str, Any]]] = [
    ((2, 1), (2, 2), [0, 1, None, None], {}, {}),
    ((1, 1), (1, 2), [0, None], {"dropout": 0.3}, {}),
    ((2, 2), (4, 1), [0, 1, 2, 3], {"tied": False}, {}),
    ((2, 1), (3, 1), [1, None, 0], {"offload": True}, {}),
    ((1, 2), (2, 2), [0, None, None, 1], {"tied": False, "optimizer": "adamw"}, {}),
    ((2, 2), (2, 3), [0, 1, 2, 3, None, None], {"padded": True}, {}),
    ((3, 1), (2, 2), [0, 1, 2, None], {"tied": False}, {"variant": "frozen"}),
]
"""Shapes before and after, the ranks that go on, and what is trained."""
USUAL = [0, 2]


def take_shape(world: SurvivorWorld, p: int, d: int, ranks: list[int | None]) -> None:
    """`ranks`: by their ranks in it, those that go on; None: a new process."""
    plan = replace(world.plan, p=p, d=d, recompute=())
    if None in ranks:
        world.grow(plan, ranks)
    else:
        world.go_on_as(plan, [rank for rank in ranks if rank is not None])


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number in USUAL else pytest.mark.slow) for number in range(len(SHAPES))],
)
def test_only_the_rest_of_the_step_is_run_in_the_next_shape(number: int, zygote: Zygote, tmp_path: Path) -> None:
    before, (p, d), ranks, task, wanted = SHAPES[number]
    case = Case(*before, task=task, waits_for_links=True, **leaving(), **wanted)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world)
        left = world.wait_until_left(set())
        assert {(one.exit_code, one.step) for one in left.values()} == {(GENERATION_ENDED, STEP - 1)}
        take_shape(world, p, d, ranks)
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
        assert "still in use" not in world.logs(), "receives that never get their message end with the links"
    assert_rest_is_run(world, case)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(2, marks=pytest.mark.slow, id="other stages"),
        pytest.param(3, id="a new process"),
        pytest.param(4, marks=pytest.mark.slow, id="new processes"),
    ],
)
def test_sums_come_while_the_rest_of_the_step_is_run(number: int, zygote: Zygote, tmp_path: Path) -> None:
    before, (p, d), ranks, task, _ = SHAPES[number]
    case = Case(*before, task=task, sums_after_backward=True, **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world)
        world.wait_until_left(set())
        take_shape(world, p, d, ranks)
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
        assert len(list(world.world.folder.rglob("sums.*"))) == len(ranks), "all had run a backward before"
    assert_rest_is_run(world, case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "work-conserving"])
def test_passes_of_each_schedule_end_early(policy: str, zygote: Zygote, tmp_path: Path) -> None:
    case = Case(3, 1, task={"tied": False}, **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case, policy=policy)
        leave_within_step(world)
        left = world.wait_until_left(set())
        assert {one.step for one in left.values()} == {STEP - 1}
        world.go_on_as(replace(world.plan, p=1, d=3, recompute=()), [2, 0, 1])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)


@pytest.mark.parametrize("is_twice", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_example_is_counted_once_when_passes_end_early(is_twice: bool, zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 1, task={**LEDGER, "global_batch": 25}, variant="ledger", **leaving(generations=1 + is_twice))
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world)
        world.wait_until_left(set())
        world.go_on_as(replace(world.plan, p=1, d=2, recompute=()), [1, 0])
        if is_twice:
            leave_within_step(world)
            left = world.wait_until_left(set())
            assert {one.step for one in left.values()} == {STEP - 1}, "all had what was late"
            world.go_on_as(replace(world.plan, p=2, d=1, recompute=()), [1, 0])
        assert_counted_once(world.finish(), case)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["F", "B"])
def test_a_rank_is_lost_while_passes_end_early(op: str, zygote: Zygote, tmp_path: Path) -> None:
    """The other replica ends its pass all the same, and what it has counts."""
    case = Case(2, 2, task=LEDGER, variant="ledger", **leaving(), kills=[op_kill(3, op, 1)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world)
        world.go_on({3})
        assert_counted_once(world.finish(), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "begun"),
    [pytest.param({"counts": True}, 1, id="the model writes buffers"), pytest.param({}, 6, id="all have begun")],
)
def test_the_step_is_finished_where_its_passes_cannot_end_early(
    task: dict[str, Any], begun: int, zygote: Zygote, tmp_path: Path
) -> None:
    case = Case(2, 2, task=task, **leaving("F" if begun == 1 else "B"))
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case, policy="gpipe")
        leave_within_step(world, begun=begun)
        left = world.wait_until_left(set())
        assert {one.step for one in left.values()} == {STEP}
        world.go_on_as(replace(world.plan, p=4, d=1, recompute=()), [0, 1, 2, 3])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (1, 2)])
def test_new_processes_run_the_rest_with_another_micro_batch(
    old: int, new: int, zygote: Zygote, tmp_path: Path
) -> None:
    case = Case(2, 1, micro_batch=old, task={**LEDGER, "global_batch": 25}, variant="ledger", **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        leave_within_step(world)
        world.wait_until_left(set())
        world.grow(replace(world.plan, d=2, micro_batch=new, recompute=()), [0, None, None, 1])
        assert_counted_once(world.finish(), case)
        ready = [message.ready for end in world.ends.values() for message in end.list_messages("ready")]
    assert [one.micro_batches_redone for one in ready] == [0] * len(ready)
