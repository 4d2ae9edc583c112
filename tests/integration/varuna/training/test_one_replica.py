"""A job with one replica loses a rank, and the others take its stage with what it had done at its newest mark."""

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
    VARIANTS,
    Case,
    assert_as_if_undisturbed,
    assert_counted_once,
    op_kill,
    read_forwards,
    start,
)
from leaving_generation import LeavingGeneration, assert_taken_from_memory
from survivor_world import SurvivorWorld
from training_world import Zygote
from varuna_proto.v1 import agent_pb2
from waiting import wait_until

EVERY = 2
AT_MARK = 5
"""The micro-batch in whose backward a rank is lost. All ranks have the mark after two then, and perhaps that after
four."""


def make_case(p: int, *, lost: int = 1, **wanted: Any) -> Case:
    kills = wanted.pop("kills", [op_kill(lost, "B", AT_MARK)])
    return Case(p, 1, marks_every=EVERY, copies_states=True, finishes=True, kills=kills, **wanted)


def start_alone(stack: ExitStack, zygote: Zygote, folder: Path, case: Case) -> SurvivorWorld:
    return start(stack, zygote, folder, case, copies_shares=True, keepers=keep_in_next(case.p))


def keep_in_next(p: int) -> tuple[int, ...]:
    return tuple((stage + 1) % p for stage in range(p))


def list_redone(world: SurvivorWorld, case: Case) -> list[int]:
    """The micro-batches of the step that the second generation ran, each at every stage once."""
    forwards, p = read_forwards(world, 2), world.plan.p
    by_stage = [
        sorted(number for rank, first in enumerate(world.ranks) if rank % p == stage for number in forwards[first])
        for stage in range(p)
    ]
    assert all(numbers == sorted(set(numbers)) == by_stage[0] for numbers in by_stage)
    reported = {world.ends[first].wait_for_number("ready", 2).ready.micro_batches_redone for first in world.ranks}
    assert reported == {len(by_stage[0])}
    return by_stage[0]


def assert_kept_at_mark(world: SurvivorWorld, case: Case) -> None:
    assert list_redone(world, case) in [list(range(mark, case.count)) for mark in (EVERY, 2 * EVERY)]
    for first in world.ranks:
        ready = world.ends[first].wait_for_number("ready", 2).ready
        assert (ready.resumed_step, ready.store_bytes) == (STEP - 1, 0)


@pytest.mark.parametrize(
    ("p", "lost", "after"),
    [
        (3, 1, (2, 1)),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in [(3, 0, (2, 1)), (3, 2, (1, 2)), (2, 1, (1, 1)), (4, 2, (3, 1))]
        ),
    ],
)
def test_a_loss_costs_what_was_done_since_the_mark(
    p: int, lost: int, after: tuple[int, int], zygote: Zygote, tmp_path: Path
) -> None:
    case = make_case(p, lost=lost, task={"doubled": True})
    with ExitStack() as stack:
        world = start_alone(stack, zygote, tmp_path, case)
        left = world.wait_until_left({lost})
        keeper = keep_in_next(p)[lost]
        assert (lost, STEP - 1) in {(copy.rank, copy.step) for copy in left[keeper].copies}
        others = [rank for rank in range(p) if rank != lost]
        plan = replace(world.plan, p=after[0], d=after[1], recompute=())
        world.go_on_as(plan, others[::-1][: after[0] * after[1]])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_kept_at_mark(world, case)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_sums_of_others_are_exact_for_all_kinds_of_training(number: int, zygote: Zygote, tmp_path: Path) -> None:
    task, wanted = VARIANTS[number]
    case = make_case(3, lost=2, task={**task, "doubled": True}, **wanted)
    with ExitStack() as stack:
        world = start_alone(stack, zygote, tmp_path, case)
        world.wait_until_left({2})
        world.go_on_as(replace(world.plan, p=2, d=1, recompute=()), [0, 1])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_kept_at_mark(world, case)


@pytest.mark.slow
def test_ranks_that_all_go_on_begin_with_their_own_marks(zygote: Zygote, tmp_path: Path) -> None:
    """Nobody is lost: all are asked to leave in the middle of the step."""
    case = make_case(3, kills=[], op_s=0.1, task={"doubled": True})
    with ExitStack() as stack:
        world = start_alone(stack, zygote, tmp_path, case)
        wait_until(lambda: all(len(ran) > EVERY + 2 for ran in read_forwards(world, 1).values()), "a pass under way")
        for end in world.ends.values():
            end.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        world.go_on(set())
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert list_redone(world, case)[0] in range(0, case.count, EVERY)


@pytest.mark.slow
def test_another_micro_batch_runs_the_whole_step_in_place(zygote: Zygote, tmp_path: Path) -> None:
    case = make_case(3)
    with ExitStack() as stack:
        world = start_alone(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=2, d=1, micro_batch=3, recompute=()), [0, 2])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
        redone = {world.ends[first].wait_for_number("ready", 2).ready.micro_batches_redone for first in world.ranks}
        assert redone == {-(-case.task.global_batch // 3)}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["", "ledger"])
def test_another_loss_in_the_rest_of_the_step(variant: str, zygote: Zygote, tmp_path: Path) -> None:
    """1 x 4 lose rank 1 and go on as 1 x 3, whose ranks begin with new copies and marks; these lose rank 2."""
    task, wanted = ({**LEDGER, "global_batch": 23}, {"variant": variant}) if variant else ({"doubled": True}, {})
    kills = [op_kill(1, "B", AT_MARK), {**op_kill(2, "F", AT_MARK), "count": 2}]
    case = make_case(4, kills=kills, task=task, **wanted)
    with ExitStack() as stack:
        world = start_alone(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=3, d=1, recompute=()), [0, 3, 2], keepers=keep_in_next(3))
        left = world.wait_until_left({2})
        assert {(copy.rank, copy.step) for copy in left[0].copies} >= {(2, STEP - 1)}
        world.go_on_as(replace(world.plan, p=2, d=1, recompute=()), [3, 0])
        if variant:
            assert_counted_once(world.finish(), case)
        else:
            assert_as_if_undisturbed(zygote, tmp_path, world, case)
    redone = [world.ends[0].wait_for_number("ready", number).ready.micro_batches_redone for number in (2, 3)]
    assert case.count > redone[0] > redone[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "left"), [({"keeps_parameters": True}, [0, 2, 3]), ({"dies_in_move": 3}, [0, 2])], ids=str
)
def test_processes_that_cannot_take_other_stages_give_the_copies_that_they_keep(
    wanted: dict[str, Any], left: list[int], zygote: Zygote, tmp_path: Path
) -> None:
    case = make_case(4, task=LEDGER, variant="ledger", **wanted)
    with ExitStack() as stack:
        world = start_alone(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=3, d=1, recompute=()), [0, 2, 3])
        gone = [world.ends[first].wait_for_number("generation_left", 2).generation_left for first in left]
        assert [(one.gives_only, one.step) for one in gone] == [(True, STEP - 1)] * len(left)
        holders = tuple(rank for rank, first in enumerate([0, 2, 3]) if first in left)
        more = {"script": SCRIPT, "wanted": {"variant": "ledger"}, "generation": 3, "holders": holders}
        after = LeavingGeneration(stack, zygote, tmp_path, case.task, 2, 1, **more)
        for first in left:
            world.ends[first].give_state(after.world.holder_environment())
        outcome = after.finish()
        assert_taken_from_memory(after, STEP - 1)
        assert [step["step"] for step in outcome.ranks[0]["steps"]] == list(range(STEP, STEPS + 1))
        assert_counted_once(outcome, case)
