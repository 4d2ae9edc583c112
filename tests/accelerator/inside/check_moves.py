"""Processes that take other stages on the simulated device.

The result is plain PyTorch's, no rank ends with a race, and the old and the new stage are never on a device together.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kept_case import Case, start
from leaving_case import leave_within_step, leaving
from memory_ranks import BATCH
from repository import TRAINING_SCRIPTS
from simulated import device_of
from small_gpt import Task, train_plainly
from survivor_world import LEAVES_AFTER, SurvivorWorld
from training_matrix import assert_equal
from training_world import Zygote

STEPS = 8
PAUSE_S = 0.4
"""Of each step from the third on, so that the command to leave comes long before the last one."""


@pytest.mark.parametrize(
    ("before", "after", "task"),
    [
        pytest.param((2, 2), (3, 1), Task(steps=STEPS, tied=True, clip=0.5, groups=True), id="tied"),
        pytest.param((1, 2), (2, 1), Task(steps=STEPS, precision="float16", offload=True), id="fp16, offload"),
    ],
)
def test_stages_move_without_a_race(
    zygote: Zygote, tmp_path: Path, before: tuple[int, int], after: tuple[int, int], task: Task
) -> None:
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, *before, wanted=LEAVES_AFTER, device=device_of)
        world.leave_at_boundary()
        p, d = after
        world.go_on_as(replace(world.plan, p=p, d=d), world.ranks[: p * d])
        outcome = world.finish()
        expected = train_plainly(task, world.world.micro_batch, device=torch.device(device_of(0)))
        assert_equal(outcome, expected, task.precision)
        for first in world.ranks:
            assert world.ends[first].wait_for_number("ready", 2).ready.store_bytes == 0


def test_the_state_goes_ahead_while_steps_run_without_a_race(zygote: Zygote, tmp_path: Path) -> None:
    """In each step another state, which the update must not change before it is copied."""
    task = Task(steps=STEPS, optimizer="adamw")
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted={"pause_s": PAUSE_S}, device=device_of)
        world.start_ahead(replace(world.plan, p=3, d=1), [0, 1, 2])
        world.ask_to_send_ahead()
        for rank in world.ranks:
            world.ends[rank].wait_for(lambda message: message.sent_ahead.step >= 2)
        world.leave_at_boundary()
        world.grow_ahead()
        world.end_others()
        expected = train_plainly(task, world.world.micro_batch, device=torch.device(device_of(0)))
        assert_equal(world.finish(), expected, task.precision)


def test_a_loss_in_a_step_moves_the_sums_without_a_race(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        wanted = {"die": {"rank": 1, "step": 4}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted, device=device_of)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=3, d=1), [3, 0, 2])
        expected = train_plainly(task, world.world.micro_batch, device=torch.device(device_of(0)))
        assert_equal(world.finish(), expected, task.precision)
        assert world.ends[3].wait_for_number("ready", 2).ready.micro_batches_redone == task.global_batch // 4


@pytest.mark.parametrize(
    ("spare", "after", "stay"), [([3], (2, 1), [0, 1]), ([1, 3], (1, 2), [0, 2])], ids=["sums", "sums and a state"]
)
def test_ranks_that_do_not_go_on_leave_what_they_have_without_a_race(
    zygote: Zygote, tmp_path: Path, spare: list[int], after: tuple[int, int], stay: list[int]
) -> None:
    case = Case(2, 2, task={"optimizer": "adamw"}, **leaving())
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case, device=device_of)
        leave_within_step(world, spare=spare)
        world.wait_until_left(set())
        world.go_on_as(replace(world.plan, p=after[0], d=after[1], recompute=()), stay)
        expected = train_plainly(case.task, case.micro_batch, device=torch.device(device_of(0)))
        assert_equal(world.finish(), expected, case.task.precision)
        for first in stay:
            ready = world.ends[first].wait_for_number("ready", 2).ready
            assert (ready.micro_batches_redone, ready.store_bytes) == (0, 0)


def test_a_stage_that_goes_has_left_the_device_before_its_successor_comes(zygote: Zygote, tmp_path: Path) -> None:
    """Each of two ranks takes the stage of the other, so nothing stays. What goes waits in host memory."""
    with ExitStack() as stack:
        wanted = {"dtype": "float32", "optimizer": {"fused": True}, "clip": None, "steps": STEPS, "pause_s": PAUSE_S}
        world = SurvivorWorld(
            stack,
            zygote,
            tmp_path,
            Task(global_batch=BATCH),
            2,
            1,
            wanted=wanted,
            device=device_of,
            micro_batch=1,
            script=TRAINING_SCRIPTS / "memory_ranks.py",
        )
        world.leave_at_boundary()
        world.go_on_as(world.plan, [1, 0])
        assert world.world.exit_codes() == [0, 0], world.logs()
        before, after = [], []
        for end in world.ends.values():
            steps = end.steps()
            assert [one.step for one in steps] == list(range(1, STEPS + 1))
            ready = [message.ready for message in end.list_messages("ready")][1]
            before.append(next(one.memory_bytes for one in steps if one.step == ready.resumed_step))
            after.append(steps[-1].memory_bytes)
            came = ready.peer_bytes + ready.late_bytes
            assert came > before[-1] / 2, "most of the memory is state, and all of it is another"
        print(before, after)
        assert max(after) <= 1.02 * max(before)
