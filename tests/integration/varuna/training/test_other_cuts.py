"""Processes take other stages in place, in any shape, and the result is that of a run without a change."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from leaving_generation import finish_in_new_processes
from small_gpt import Task, make_model, train_plainly
from survivor_world import LEAVES_AFTER, SurvivorWorld
from training_kills import SCRIPT
from training_world import Ranks, Zygote, assert_exact
from varuna_proto.state_use import OTHER_STAGES

STEPS = 8


def assert_as_if_undisturbed(world: SurvivorWorld, task: Task) -> None:
    assert_exact(world.finish(), train_plainly(task), task)


CHANGES = [
    ((2, 2), (3, 1), Task(steps=STEPS, tied=True, clip=0.5, groups=True)),
    ((2, 1), (1, 2), Task(steps=STEPS, global_batch=11, clip=0.5, counts=True)),
    ((1, 2), (2, 1), Task(steps=STEPS, optimizer="momentum", offload=True)),
    ((2, 2), (1, 2), Task(steps=STEPS, tied_blocks=(0, 2), optimizer="lamb")),
    ((2, 2), (1, 2), Task(steps=STEPS, global_batch=11, padded=True, skip=True)),
    ((2, 2), (3, 1), Task(steps=STEPS, groups=True, frozen=True, checkpointed=True)),
    ((1, 3), (3, 1), Task(steps=STEPS, global_batch=23, tied=True, clip=0.5, optimizer="momentum")),
]
"""Shapes before and after, and what is trained. Every task has a learning rate that changes."""


@pytest.mark.parametrize("doubled", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=pytest.mark.slow if number else ()) for number in range(len(CHANGES))]
)
def test_processes_take_the_stages_of_another_shape(number: int, doubled: bool, zygote: Zygote, tmp_path: Path) -> None:
    before, after, task = CHANGES[number]
    task = replace(task, doubled=doubled)
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, *before, wanted=LEAVES_AFTER)
        world.leave_at_boundary()
        p, d = after
        (step,) = set(world.go_on_as(replace(world.plan, p=p, d=d), world.ranks[: p * d]))
        assert_as_if_undisturbed(world, task)
        for first in world.ranks:
            ready = world.ends[first].wait_for_number("ready", 2).ready
            assert ready.resumed_step == step
            assert ready.store_bytes == 0
        taken = [world.ends[first].wait_for_number("ready", 2).ready.peer_bytes for first in world.ranks]
        assert (sum(taken) > 0) is (before[0] > 1)


def test_a_buffer_that_the_script_has_filled_comes_to_a_stage_that_only_reads_it(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The process of the first stage, whose code does not read it, takes the last one; another stage owns it."""
    task = Task(steps=STEPS, scaled=True, doubled=True)
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=LEAVES_AFTER)
        world.leave_at_boundary()
        world.go_on_as(replace(world.plan, p=4, d=1), [3, 2, 1, 0])
        assert_as_if_undisturbed(world, task)


@pytest.mark.slow
def test_the_script_keeps_its_random_numbers_and_its_average_in_another_shape(zygote: Zygote, tmp_path: Path) -> None:
    """Dropout draws the same masks for each example, and more is kept than plain training has."""
    task = Task(steps=STEPS, dropout=0.2, doubled=True)
    wanted: dict[str, object] = {"varuna": {"ema": 0.9}}
    with Ranks(zygote, tmp_path / "undisturbed", task, 1, 1, wanted=wanted) as undisturbed:
        expected = undisturbed.finish()
    with ExitStack() as stack:
        wanted = {**wanted, **LEAVES_AFTER}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        world.leave_at_boundary()
        world.go_on_as(replace(world.plan, p=3, d=1, micro_batch=1), world.ranks[1:])
        assert_exact(world.finish(), expected, task)


def test_a_loss_takes_the_others_to_another_shape(zygote: Zygote, tmp_path: Path) -> None:
    """In the middle of a step, whose kept share moves with the stages: the lost replica's is run again."""
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        wanted = {"die": {"rank": 1, "step": 4}, "passes_first": [2, 3]}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        world.wait_until_left({1})
        (step,) = set(world.go_on_as(replace(world.plan, p=3, d=1), [3, 0, 2]))
        assert step == 3
        assert_as_if_undisturbed(world, task)
        assert world.ends[3].wait_for_number("ready", 2).ready.micro_batches_redone == task.global_batch // 4


def test_the_states_size_has_the_optimizers_after_a_loss_in_the_first_step(zygote: Zygote, tmp_path: Path) -> None:
    """Processes that take other stages before the first update have no optimizers' state yet."""
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        wanted = {"kill": {"rank": 1, "at": "before the sums"}, "leaves_after": {"step": 3, "generations": 2}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted, script=SCRIPT)
        world.wait_until_left({1})
        assert world.go_on_as(replace(world.plan, p=3, d=1), [0, 3, 2]) == [0, 0, 0]
        world.leave_at_boundary()
        held = [left.held_bytes for left in world.wait_until_left(set()).values()]
        parameter_bytes = sum(parameter.nbytes for parameter in make_model(task).parameters())
        assert sum(held) >= 3 * parameter_bytes  # Adam has two tensors beside each parameter
        world.go_on_as(world.plan, world.ranks)
        assert_as_if_undisturbed(world, task)


@pytest.mark.slow
def test_ranks_become_the_last_stage_in_a_first_step_whose_weight_only_some_know(
    zygote: Zygote, tmp_path: Path
) -> None:
    task = Task(steps=3, padded=True, doubled=True)
    with ExitStack() as stack:
        wanted = {"kill": {"rank": 3, "at": "before the sums"}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted, script=SCRIPT)
        world.wait_until_left({3})
        assert world.go_on_as(replace(world.plan, p=1, d=3), [0, 1, 2]) == [0, 0, 0]
        assert_as_if_undisturbed(world, task)


def test_a_rank_is_lost_in_the_exchange_and_the_others_have_everything(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        wanted = {**LEAVES_AFTER, "dies_in_move": 2}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        world.leave_at_boundary()
        world.go_on_as(replace(world.plan, p=4, d=1), [3, 2, 1, 0])
        left = finish_in_new_processes(stack, zygote, tmp_path, world, {0: 3, 2: 1, 3: 0})
        assert all(one.gives_only for one in left)


def test_a_rank_is_lost_as_the_others_connect_with_their_new_stages(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        wanted = {**LEAVES_AFTER, "dies_connecting": 2}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        world.leave_at_boundary()
        world.go_on_as(replace(world.plan, p=4, d=1), [3, 2, 1, 0])
        left = finish_in_new_processes(stack, zygote, tmp_path, world, {0: 3, 2: 1, 3: 0})
        assert all(one.gives_only for one in left)


def test_a_script_that_keeps_parameters_restarts_from_memory(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS, optimizer="momentum")
    with ExitStack() as stack:
        wanted = {**LEAVES_AFTER, "keeps_parameters": True}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 1, wanted=wanted)
        world.leave_at_boundary()
        world.go_on_as(replace(world.plan, p=1, d=2), [1, 0])
        reason = world.wait_for_obstacle()
        assert reason.startswith(f"{OTHER_STAGES}the script or a module keeps ")
        left = finish_in_new_processes(stack, zygote, tmp_path, world, {0: 1, 1: 0})
        assert all(one.gives_only for one in left)


def test_ranks_that_once_do_not_get_a_state_restart_from_memory(zygote: Zygote, tmp_path: Path) -> None:
    """The script is not to blame, so the next move is tried."""
    with ExitStack() as stack:
        wanted = {**LEAVES_AFTER, "refuses_in_move": 0}
        world = SurvivorWorld(stack, zygote, tmp_path, Task(steps=STEPS), 2, 1, wanted=wanted)
        world.leave_at_boundary()
        world.go_on_as(replace(world.plan, p=1, d=2), [1, 0])
        left = finish_in_new_processes(stack, zygote, tmp_path, world, {0: 1, 1: 0})
        assert all(one.gives_only for one in left)
        assert "it was told to refuse" in world.logs()
        assert not any(end.list_messages("script_obstacle") for end in world.ends.values())
