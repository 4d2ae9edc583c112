"""New processes take the state from the memories of those of the generation before, in any shape, and go on exactly."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from leaving_generation import (
    LeavingGeneration,
    assert_as_if_undisturbed,
    assert_taken_from_memory,
    replace_steps,
)
from small_gpt import Task
from survivor_world import LEAVES_AFTER
from training_world import Zygote
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST
from varuna_proto.v1 import agent_pb2

STEPS = 8


@pytest.mark.parametrize(
    ("before", "after", "task"),
    [
        ((2, 2), (1, 3), Task(steps=STEPS, global_batch=12)),
        pytest.param((1, 2), (2, 1), Task(steps=STEPS, optimizer="momentum"), marks=pytest.mark.slow),
        pytest.param((2, 1), (4, 1), Task(steps=STEPS, tied=True, clip=0.5), marks=pytest.mark.slow),
        pytest.param((3, 1), (2, 2), Task(steps=STEPS, tied_blocks=(0, 2), optimizer="lamb"), marks=pytest.mark.slow),
        pytest.param((2, 2), (2, 2), Task(steps=STEPS, offload=True, dropout=0.1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_shape_goes_on_from_the_memories_of_the_one_before(
    before: tuple[int, int], after: tuple[int, int], task: Task, zygote: Zygote, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        first = LeavingGeneration(stack, zygote, tmp_path, task, *before, wanted=LEAVES_AFTER)
        step = first.hold_first()
        holders = set(range(before[0] * before[1]))
        second = LeavingGeneration(stack, zygote, tmp_path, task, *after, generation=2, holders=tuple(sorted(holders)))
        first.give_to(second, holders)
        outcome = second.finish()
        assert_taken_from_memory(second, step)
        assert first.world.exit_codes() == [EXIT_GENERATION_ENDED] * len(holders), "holders end when all is taken"
        if task.dropout:  # plain training draws other masks
            assert sorted(second.losses()) == list(range(step + 1, STEPS + 1))
        else:
            assert_as_if_undisturbed(task, [first, second], outcome)


@pytest.mark.parametrize("fault", [pytest.param("die", marks=pytest.mark.slow), "raise"])
def test_a_loss_costs_a_script_that_cannot_be_carried_no_committed_step(
    fault: str, zygote: Zygote, tmp_path: Path
) -> None:
    """The script copies its batches, so its processes cannot go on. The survivors of each stage give what they hold."""
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        wanted = {"copies_batches": True, fault: {"rank": 1, "step": 5}}
        first = LeavingGeneration(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        step = first.wait_until_left({0, 2, 3}, EXIT_PEER_LOST)
        assert step == 4
        assert all(first.ends[rank].wait_for_number("generation_left", 1).generation_left.gives_only for rank in (0, 3))
        second = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, generation=2, holders=(0, 2, 3))
        first.give_to(second, {0, 2, 3})
        outcome = second.finish()
        assert_taken_from_memory(second, step)
        assert_as_if_undisturbed(task, [first, second], outcome)


@pytest.mark.slow
def test_holders_give_to_the_generation_after_one_that_has_failed(zygote: Zygote, tmp_path: Path) -> None:
    """A rank of the second generation dies before it has loaded, so the holders still have everything."""
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        first = LeavingGeneration(stack, zygote, tmp_path, task, 1, 2, wanted=LEAVES_AFTER)
        step = first.hold_first()
        second = LeavingGeneration(
            stack, zygote, tmp_path, task, 2, 1, generation=2, holders=(0, 1), wanted={"dies_before_resume": 1}
        )
        first.give_to(second, {0, 1})
        for end in first.ends:
            end.wait_for_number("giving_state", 1)
        second.world.exit_codes()
        third = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, generation=3, holders=(0, 1))
        first.give_to(third, {0, 1})
        outcome = third.finish()
        assert_taken_from_memory(third, step)
        assert_as_if_undisturbed(task, [first, third], outcome)


def test_a_section_that_nobody_holds_comes_from_the_store(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        more = {"checkpoint_url": str(tmp_path / "store"), "environ": {"VARUNA_CHECKPOINT_INTERVAL_S": "0.01"}}
        first = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, wanted=LEAVES_AFTER, **more)
        first.ends[0].wait_for(lambda message: message.HasField("checkpoint_done"))
        first.hold_first()
        saved = max(
            message.checkpoint_done.step for message in first.ends[0].messages if message.HasField("checkpoint_done")
        )
        second = LeavingGeneration(stack, zygote, tmp_path, task, 1, 1, generation=2, holders=(0,), **more)
        first.give_to(second, {0})
        outcome = second.finish()
        ready = second.ends[0].wait_for_number("ready", 1).ready
        assert ready.resumed_step >= saved
        assert ready.peer_bytes == 0 < ready.store_bytes
        assert_as_if_undisturbed(task, [replace_steps(first, ready.resumed_step), second], outcome)


def test_a_rank_that_cannot_hold_makes_all_save(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=500, learning_rate=1e-3)
    with ExitStack() as stack:
        more = {"checkpoint_url": str(tmp_path / "store"), "environ": {"VARUNA_IN_PLACE": "0"}}
        first = LeavingGeneration(stack, zygote, tmp_path, task, 2, 1, wanted={"forever": True}, **more)
        first.ends[0].wait_for(lambda message: message.step_done.step >= 3)
        for end in first.ends:
            end.send_leave(agent_pb2.STOP_MODE_HOLD_FIRST, keep_state=True)
        assert first.world.exit_codes() == [EXIT_GENERATION_ENDED] * 2, first.world.logs()
        first.ends[0]._thread.join()  # what the process had sent is read
        saved = [
            message.checkpoint_done.step for message in first.ends[0].messages if message.HasField("checkpoint_done")
        ]
        assert saved[-1] == first.ends[0].steps()[-1].step


@pytest.mark.parametrize("copies_batches", [True, False])
def test_ranks_that_are_to_go_on_in_place_save_only_if_one_cannot(
    zygote: Zygote, tmp_path: Path, copies_batches: bool
) -> None:
    """As they leave before a VM does. A script that copies its batches keeps its processes from going on."""
    task = Task(steps=500, learning_rate=1e-3)
    more = {"checkpoint_url": str(tmp_path / "store")}
    with ExitStack() as stack:
        wanted = {"forever": True, "copies_batches": copies_batches}
        first = LeavingGeneration(stack, zygote, tmp_path, task, 1, 2, wanted=wanted, **more)
        first.ends[0].wait_for(lambda message: message.step_done.step >= 3)
        for end in first.ends:
            end.send_leave(agent_pb2.STOP_MODE_HOLD_FIRST, keep_state=True, in_place=True)
        step = first.wait_until_left({0, 1}, EXIT_GENERATION_ENDED)
        saved = [
            message.checkpoint_done.step for message in first.ends[0].messages if message.HasField("checkpoint_done")
        ]
        assert (saved[-1:] == [step]) is copies_batches
        for end in first.ends:
            end.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW)
        first.world.exit_codes()
