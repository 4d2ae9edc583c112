"""Replicas that run different numbers of micro-batches train as one process does, and shares change in place."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kept_case import (
    LEDGER,
    SCRIPT,
    STEP,
    STEPS,
    Case,
    M,
    assert_as_if_undisturbed,
    assert_counted_once,
    op_kill,
    read_forwards,
    start,
)
from leaving_case import leaving
from small_gpt import Task, train_plainly
from survivor_world import LEAVES_AFTER, SurvivorWorld
from training_world import Ranks, Zygote, assert_exact
from varuna_planner.schedule.batching import micro_batches
from varuna_proto.v1 import agent_pb2
from waiting import wait_until

TASK = Task(global_batch=7, clip=0.5, optimizer="momentum", tied=True)
"""Four micro-batches of 2; the last one has one example."""


def test_replicas_with_unequal_shares_train_as_one_process_does(zygote: Zygote, tmp_path: Path) -> None:
    with Ranks(zygote, tmp_path, TASK, 1, 2, shares=(3, 1), script=SCRIPT) as world:
        outcome = world.finish()

    expected = train_plainly(TASK)
    assert_exact(outcome, expected, TASK)
    assert read_forwards(world, 1) == {0: [0, 1, 2], 1: [3]}
    assert [rank["evaluated"] for rank in outcome.ranks] == pytest.approx([expected.evaluated] * 2, rel=1e-6)


def test_pipelines_with_unequal_shares_draw_what_those_with_equal_ones_draw(zygote: Zygote, tmp_path: Path) -> None:
    task = replace(TASK, global_batch=11, dropout=0.3, padded=True)
    more: dict[str, Any] = {"recompute": (True, False), "run_ahead": 1, "script": SCRIPT}
    with (
        Ranks(zygote, tmp_path / "unequal", task, 2, 2, shares=(4, 2), **more) as unequal,
        Ranks(zygote, tmp_path / "equal", task, 2, 2, **more) as equal,
    ):
        assert_exact(unequal.finish(), equal.finish(), task)
    assert read_forwards(unequal, 1) == {rank: [0, 1, 2, 3] if rank < 2 else [4, 5] for rank in range(4)}
    assert read_forwards(equal, 1) == {rank: [0, 1, 2] if rank < 2 else [3, 4, 5] for rank in range(4)}


def test_a_resumed_run_with_other_shares_sees_the_samples_that_come_next(zygote: Zygote, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    begun = replace(TASK, steps=2)
    with Ranks(
        zygote, tmp_path, begun, 1, 2, shares=(1, 3), checkpoint_url=url, wanted={"save": {"step": 2, "url": url}}
    ) as world:
        world.finish()
    with Ranks(zygote, tmp_path, TASK, 2, 2, generation=2, checkpoint_url=url) as world:
        resumed = world.finish()

    assert resumed.ranks[0]["first"] == 3
    assert_exact(resumed, train_plainly(TASK), TASK, after=2)


def list_forwards(world: SurvivorWorld, generation: int, step: int) -> list[list[int]]:
    """By replica of the present generation: the micro-batches that it ran."""
    forwards = read_forwards(world, generation, step)
    return [forwards[first] for first in world.ranks[:: world.plan.p]]


@pytest.mark.parametrize(
    ("before", "lost", "after", "redone"),
    [
        ((2, 1, 1), 0, (3, 1), [[0, 1], []]),
        pytest.param((2, 1, 1), 1, (1, 3), [[], [2]], marks=pytest.mark.slow),
        pytest.param((), 2, (1, 3), [[], [3]], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_survivors_share_the_rest_of_the_step_as_the_next_plan_does(
    before: tuple[int, ...],
    lost: int,
    after: tuple[int, ...],
    redone: list[list[int]],
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    task = {"global_batch": TASK.global_batch, "dropout": 0.3}
    case = Case(1, 3, task=task, shares=before, kills=[op_kill(lost, "B", 0)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({lost})
        world.go_on_as(replace(world.plan, d=2, shares=after), [rank for rank in range(3) if rank != lost])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert list_forwards(world, 2, STEP) == redone
    assert list_forwards(world, 2, STEP + 1) == [[*run] for run in micro_batches(TASK.global_batch, M, 2, after)]


def test_shares_change_in_place_in_the_middle_of_a_step_and_nothing_moves(zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 2, task={"global_batch": 11}, shares=(2, 4), **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        for end in world.ends.values():
            end.wait_for(lambda message: message.step_done.step == STEP - 1)
        wait_until(lambda: all(read_forwards(world, 1).values()), "a pass under way")
        for end in world.ends.values():
            end.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        world.go_on_as(replace(world.plan, shares=(4, 2)), world.ranks)
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    for first in world.ranks:
        ready = world.ends[first].wait_for_number("ready", 2).ready
        assert (ready.peer_bytes, ready.store_bytes, ready.micro_batches_redone) == (0, 0, 0)
        assert ready.kept_bytes > 0
    assert list_forwards(world, 2, STEP) == [[], []]
    assert list_forwards(world, 2, STEPS) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.slow
def test_a_job_with_equal_shares_grows_into_one_with_unequal_shares(zygote: Zygote, tmp_path: Path) -> None:
    task = replace(TASK, steps=8)
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 1, wanted=LEAVES_AFTER)
        world.leave_at_boundary()
        world.grow(replace(world.plan, d=2, shares=(1, 3)), [None, None, 0, 1])
        assert_exact(world.finish(), train_plainly(task), task)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, (6, 2)), (1, 4, (4, 2, 1, 1)), (3, 1, (8,))], ids=str)
@pytest.mark.parametrize("marks", [{}, {"marks_every": 1, "finishes": False}], ids=["whole shares", "marks"])
def test_every_example_is_counted_once_where_shares_and_shapes_change(
    shape: tuple[int, int, tuple[int, ...]], marks: dict[str, Any], zygote: Zygote, tmp_path: Path
) -> None:
    p, d, shares = shape
    kills = [op_kill(1, "B", 2)]
    case = Case(2, 3, task=LEDGER, shares=(4, 3, 1), variant="ledger", kills=kills, **marks)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case, copies_shares=bool(marks))
        world.wait_until_left({1})
        plan = replace(world.plan, p=p, d=d, shares=shares, recompute=())
        world.go_on_as(plan, [2, 3, 4, 5, 0][: p * d])
        assert_counted_once(world.finish(), case)
    assert list_forwards(world, 2, STEP + 1) == [[*run] for run in micro_batches(case.task.global_batch, M, d, shares)]
