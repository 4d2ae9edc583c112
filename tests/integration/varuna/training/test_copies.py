"""Each stage has one process, and one is lost: the job goes on from the copies that others keep, with equal losses."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from leaving_generation import (
    LeavingGeneration,
    assert_as_if_undisturbed,
    assert_taken_from_memory,
    finish_in_new_processes,
    replace_steps,
)
from repository import TRAINING_SCRIPTS
from small_gpt import Task, train_plainly
from survivor_world import SurvivorWorld
from training_world import Zygote, assert_exact
from varuna_proto.environment import EXIT_PEER_LOST
from varuna_proto.v1 import agent_pb2

SCRIPT = TRAINING_SCRIPTS / "copies_script.py"
STEPS = 8
LOST_IN = 6
KEEPERS = (1, 2, 0)


def lose(
    stack: ExitStack, zygote: Zygote, folder: Path, task: Task, lost: list[dict[str, object]], **more: object
) -> tuple[LeavingGeneration, set[int], int]:
    """A generation of 3×1 that loses ranks: the others, and the step that they hold."""
    wanted = {"lost": lost, "copies_batches": True, **more.pop("wanted", {})}  # type: ignore[dict-item]
    first = LeavingGeneration(stack, zygote, folder, task, 3, 1, wanted=wanted, script=SCRIPT, keepers=KEEPERS, **more)
    left = {0, 1, 2} - {one["rank"] for one in lost}
    return first, left, first.wait_until_left(left, EXIT_PEER_LOST)  # type: ignore[return-value, arg-type]


def kept_by(generation: LeavingGeneration, rank: int) -> set[tuple[int, int]]:
    left = generation.ends[rank].wait_for_number("generation_left", 1).generation_left
    return {(copy.rank, copy.step) for copy in left.copies}


@pytest.mark.parametrize(
    ("rank", "lost_in", "task", "after"),
    [
        pytest.param(0, LOST_IN, Task(steps=STEPS, tied=True, clip=0.5), (1, 2), marks=pytest.mark.slow),
        pytest.param(1, LOST_IN, Task(steps=STEPS), (2, 1), marks=pytest.mark.slow),
        (1, 2, Task(steps=STEPS), (2, 1)),
        pytest.param(2, LOST_IN, Task(steps=STEPS, offload=True, optimizer="momentum"), (3, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loss_costs_no_committed_step(
    rank: int, lost_in: int, task: Task, after: tuple[int, int], zygote: Zygote, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        first, left, step = lose(stack, zygote, tmp_path, task, [{"rank": rank, "step": lost_in, "at": "whole"}])
        assert step == lost_in - 1
        assert (rank, step) in kept_by(first, KEEPERS[rank])
        second = LeavingGeneration(stack, zygote, tmp_path, task, *after, generation=2, holders=tuple(sorted(left)))
        first.give_to(second, left)
        outcome = second.finish()
        assert_taken_from_memory(second, step)
        assert_as_if_undisturbed(task, [first, second], outcome)


def test_all_ranks_report_that_one_has_no_room_for_copies(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=4)
    with ExitStack() as stack:
        wanted = {"copies_batches": True, "no_room": 2}
        first = LeavingGeneration(stack, zygote, tmp_path, task, 3, 1, wanted=wanted, script=SCRIPT, keepers=KEEPERS)
        first.finish()
        for end in first.ends:
            end.wait_for(lambda message: message.step_done.step == task.steps)
            newest = end.steps()[-1]
            assert newest.copies_obstacle.startswith("rank 2: there is not enough host memory on this VM")
            assert (newest.copied_step, newest.marks_obstacle) == (0, "")


def test_a_loss_while_its_copy_is_half_way_costs_one_step(zygote: Zygote, tmp_path: Path) -> None:
    """All ranks can give the step before that: their own copies of it stay until those of all ranks are whole."""
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        first, left, step = lose(stack, zygote, tmp_path, task, [{"rank": 1, "step": LOST_IN, "at": "half"}])
        assert step == LOST_IN - 1
        assert {(1, LOST_IN - 2), (2, LOST_IN - 2)} <= kept_by(first, 2)
        assert (1, LOST_IN - 1) not in kept_by(first, 2)
        second = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, generation=2, holders=(0, 2))
        first.give_to(second, left)
        outcome = second.finish()
        assert_taken_from_memory(second, LOST_IN - 2)
        # A rank may leave while it makes the update of a step, which it reports when that is made.
        copied = {done.step: done.copied_step for done in first.ends[0].steps()}
        assert copied[LOST_IN - 1] == LOST_IN - 2, "the agents know the step whose copies are all whole"
        assert copied[1] == 0
        assert_as_if_undisturbed(task, [replace_steps(first, LOST_IN - 2), second], outcome)


def test_a_loss_in_an_evaluation_costs_the_steps_since_the_newest_copy(zygote: Zygote, tmp_path: Path) -> None:
    """New processes begin with a step, and the others are between two."""
    task, lost_after = Task(steps=STEPS), 3
    with ExitStack() as stack:
        wanted = {"copies_batches": False, "validates": 2, "dies_validating": {"rank": 1, "step": lost_after}}
        first = LeavingGeneration(stack, zygote, tmp_path, task, 3, 1, wanted=wanted, script=SCRIPT, keepers=KEEPERS)
        assert first.wait_until_left({0, 2}, EXIT_PEER_LOST) == lost_after
        second = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, generation=2, holders=(0, 2))
        first.give_to(second, {0, 2})
        outcome = second.finish()
        assert_taken_from_memory(second, lost_after - 1)
        assert_as_if_undisturbed(task, [replace_steps(first, lost_after - 1), second], outcome)


def lose_two(stack: ExitStack, zygote: Zygote, folder: Path, task: Task) -> SurvivorWorld:
    """Rank 0 of 2×2 is lost, and then rank 3, before it meets rank 2 in 2×1: that one is left, with a copy of rank 1's
    state, which has the other stage."""
    wanted = {"lost": [{"rank": 0, "step": LOST_IN, "at": "all whole"}]}
    world = SurvivorWorld(stack, zygote, folder, task, 2, 2, wanted=wanted, script=SCRIPT, keepers=(3, 2))
    left = world.wait_until_left({0})
    assert left[2].step == LOST_IN - 1
    assert (1, LOST_IN - 1) in {(copy.rank, copy.step) for copy in left[2].copies}
    world.go_on_as(replace(world.plan, d=1), [2, 3], absent={3})
    world.ends[2].wait_for_number("hello", 2)
    world.ends[2].send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
    world.ends[3].hang_up()
    return world


def test_a_copy_is_given_with_a_state_that_has_failed_to_go_on(zygote: Zygote, tmp_path: Path) -> None:
    """They are of two generations, and of the same step."""
    with ExitStack() as stack:
        world = lose_two(stack, zygote, tmp_path, Task(steps=STEPS))
        [left] = finish_in_new_processes(stack, zygote, tmp_path, world, {0: 2})
        assert (left.gives_only, left.step) == (False, LOST_IN - 1)


def test_a_rank_takes_the_stage_of_a_copy_after_it_has_failed_to_go_on(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        world = lose_two(stack, zygote, tmp_path, task)
        assert world.go_on_as(replace(world.plan, p=1, d=1, recompute=()), [2]) == [LOST_IN - 1]
        assert_exact(world.finish(), train_plainly(task), task)
        assert not world.ends[2].list_messages("script_obstacle")


@pytest.mark.slow
def test_owner_and_keeper_lost_together_send_all_to_the_store(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        more = {"checkpoint_url": str(tmp_path / "store"), "environ": {"VARUNA_CHECKPOINT_INTERVAL_S": "0.01"}}
        lost = [{"rank": rank, "step": LOST_IN, "at": "whole"} for rank in (0, 1)]
        first, left, _ = lose(stack, zygote, tmp_path, task, lost, **more)
        second = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, generation=2, holders=(2,), **more)
        first.give_to(second, left)
        outcome = second.finish()
        ready = second.ends[0].wait_for_number("ready", 1).ready
        assert ready.peer_bytes == 0 < ready.store_bytes
        assert "do not hold the whole state" in second.world.logs()
        assert_as_if_undisturbed(task, [replace_steps(first, ready.resumed_step), second], outcome)


@pytest.mark.slow
def test_a_damaged_copy_is_refused_and_sent_again(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        lost = [{"rank": 1, "step": LOST_IN, "at": "whole"}]
        wanted = {"damages": {"rank": 1, "step": LOST_IN - 1}}
        first, left, step = lose(stack, zygote, tmp_path, task, lost, wanted=wanted)
        logs = first.world.logs()
        assert "a chunk of it came damaged" in logs
        assert "is sent again" in logs
        second = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, generation=2, holders=(0, 2))
        first.give_to(second, left)
        outcome = second.finish()
        assert_taken_from_memory(second, step)
        assert_as_if_undisturbed(task, [first, second], outcome)
