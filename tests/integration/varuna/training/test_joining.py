"""New processes join survivors in one generation, and the result is that of a run without a change."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from leaving_generation import finish_in_new_processes
from small_gpt import Task, make_model, train_plainly
from survivor_world import LEAVES_AFTER, SurvivorWorld
from training_world import Zygote, assert_exact

STEPS = 8


def assert_as_if_undisturbed(world: SurvivorWorld, task: Task) -> None:
    assert_exact(world.finish(), train_plainly(task), task)


@pytest.mark.parametrize(
    ("before", "after", "ranks", "task"),
    [
        ((2, 1), (2, 2), [0, 1, None, None], Task(steps=STEPS, tied=True, clip=0.5, optimizer="momentum", padded=True)),
        pytest.param((1, 1), (1, 2), [0, None], Task(steps=STEPS, counts=True), marks=pytest.mark.slow),
        pytest.param((1, 2), (1, 3), [None, 1, 0], Task(steps=STEPS, global_batch=12), marks=pytest.mark.slow),
        pytest.param((1, 2), (2, 2), [0, None, None, 1], Task(steps=STEPS, optimizer="lamb"), marks=pytest.mark.slow),
        pytest.param((2, 1), (3, 1), [1, None, 0], Task(steps=STEPS, offload=True), marks=pytest.mark.slow),
        pytest.param(
            (2, 1), (2, 2), [0, None, None, 1], Task(steps=STEPS, groups=True, frozen=True), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_job_grows_with_its_processes_and_new_ones(
    before: tuple[int, int],
    after: tuple[int, int],
    ranks: list[int | None],
    task: Task,
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    task = replace(task, doubled=True)
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, *before, wanted=LEAVES_AFTER)
        world.leave_at_boundary()
        p, d = after
        step = world.grow(replace(world.plan, p=p, d=d), ranks)
        assert_as_if_undisturbed(world, task)
        for first in world.ranks:
            is_new = first >= before[0] * before[1]
            ready = world.ends[first].wait_for_number("ready", 1 if is_new else 2).ready
            assert ready.resumed_step == step
            assert ready.store_bytes == 0
            assert not is_new or ready.peer_bytes > 0


def test_new_processes_take_the_parameters_of_a_model_on_meta_from_the_others(zygote: Zygote, tmp_path: Path) -> None:
    """In another shape, so that survivors take other stages, too."""
    task = Task(steps=STEPS, doubled=True)
    weights = tmp_path / "model.safetensors"
    save_file(make_model(task).state_dict(), weights)
    with ExitStack() as stack:
        wanted = {**LEAVES_AFTER, "weights": str(weights)}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 1, wanted=wanted)
        world.leave_at_boundary()
        world.grow(replace(world.plan, p=3, d=1), [1, None, 0])
        assert_as_if_undisturbed(world, task)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"dies_before_resume": 1}, ""),
        ({"evaluates_first": True}, "a new process calls evaluate() before step(), where the others wait for it"),
        ({"trains_other": True}, "a new process has traced the model differently"),
        ({"lowers_rate": True}, "lr of parameter group 0 is "),
    ],
    ids=["it dies", "it evaluates first", "its model is another", "its learning rate is another"],
)
def test_the_others_keep_everything_where_a_new_process_cannot_join(
    wanted: dict[str, object], reason: str, zygote: Zygote, tmp_path: Path
) -> None:
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, 1, 1, wanted=LEAVES_AFTER)
        world.leave_at_boundary()
        world.grow(replace(world.plan, d=2), [0, None], wanted=wanted)
        finish_in_new_processes(stack, zygote, tmp_path, world, {0: 0})
        assert reason in world.logs()
