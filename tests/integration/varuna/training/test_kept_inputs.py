"""A loader of the script's own cannot follow its job into another shape. Survivors still end the step under way, with
the lost replica's inputs from its other ranks. Then new processes go on from their memories."""

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
    assert_counted_once,
    assert_loss_counts_once,
    op_kill,
    read_forwards,
    start,
    train_undisturbed,
)
from leaving_generation import LeavingGeneration, assert_taken_from_memory
from survivor_world import SurvivorWorld
from training_world import Zygote, assert_exact
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST

OWN_LOADERS = [{"copies_batches": True}, {"asks_for_shape": True}]


def make_case(p: int, d: int, *, kills: list[dict[str, Any]], **more: Any) -> Case:
    return Case(p, d, kills=kills, **{"copies_batches": True, "keeps_inputs": True, **more})


def hand_over(
    stack: ExitStack, zygote: Zygote, folder: Path, world: SurvivorWorld, case: Case, *, step: int
) -> LeavingGeneration:
    """Waits until all ranks have left by themselves after `step` steps, and starts new processes, which take the state.

    They have the stages of the ranks that leave, and one replica.
    """
    number = world.generation
    left = [world.ends[first].wait_for_number("generation_left", number).generation_left for first in world.ranks]
    assert {(one.gives_only, one.step) for one in left} == {(True, step)}
    assert EXIT_GENERATION_ENDED in {one.exit_code for one in left} <= {EXIT_GENERATION_ENDED, EXIT_PEER_LOST}
    world.end_others()
    wanted = {
        name: case.wanted[name] for name in ("variant", "copies_batches", "asks_for_shape") if name in case.wanted
    }
    after = LeavingGeneration(
        stack,
        zygote,
        folder,
        case.task,
        case.p,
        1,
        script=SCRIPT,
        wanted=wanted,
        generation=number + 1,
        holders=tuple(range(len(world.ranks))),
    )
    for first in world.ranks:
        world.ends[first].give_state(after.world.holder_environment())
    return after


@pytest.mark.parametrize(
    ("d", "rank", "loader"),
    [
        (2, 1, OWN_LOADERS[0]),
        pytest.param(2, 0, OWN_LOADERS[1], marks=pytest.mark.slow),
        pytest.param(3, 2, OWN_LOADERS[0], marks=pytest.mark.slow),
        pytest.param(3, 5, OWN_LOADERS[1], marks=pytest.mark.slow),
    ],
)
def test_survivors_end_the_step_and_new_processes_go_on(
    d: int, rank: int, loader: dict[str, bool], zygote: Zygote, tmp_path: Path
) -> None:
    op = "B" if rank % 2 else "F"  # after the first stage's last F, the last one may have its sums already
    case = make_case(2, d, kills=[op_kill(rank, op, 2)], **loader)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        assert world.go_on({rank}, keeps_others=True) == [STEP - 1] * 2 * (d - 1)
        after = hand_over(stack, zygote, tmp_path, world, case, step=STEP)
        outcome = after.finish()
        assert_taken_from_memory(after, STEP)
        assert_exact(outcome, train_undisturbed(zygote, tmp_path, case), case.task, after=STEP)
    redone = [world.ends[first].wait_for_number("ready", 2).ready.micro_batches_redone for first in world.ranks]
    assert redone == [len(case.share(rank // 2))] * len(world.ranks)
    ran = read_forwards(world, 2)
    for stage in range(2):
        numbers = [number for first in world.ranks[stage::2] for number in ran[first]]
        assert sorted(numbers) == sorted(case.share(rank // 2))


LOSSES: dict[str, tuple[int, list[list[dict[str, Any]]]]] = {
    "one rank": (2, [[op_kill(1, "B", 2)]]),
    "a rank of each of two replicas": (3, [[op_kill(0, "F", 1), op_kill(3, "B", 2)]]),
    "another rank in the rest": (3, [[op_kill(1, "B", 0)], [{**op_kill(2, "F", 1), "count": 2}]]),
}
"""Replicas, and the ranks that are lost one after the other in one step."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "another rank in the rest" else pytest.mark.slow) for name in LOSSES],
)
def test_every_example_of_every_step_is_counted_once(name: str, zygote: Zygote, tmp_path: Path) -> None:
    d, losses = LOSSES[name]
    case = make_case(2, d, task=LEDGER, variant="ledger", kills=[kill for kills in losses for kill in kills])
    lost: set[int] = set()
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        for kills in losses:
            lost |= {kill["rank"] for kill in kills}
            world.go_on(lost, keeps_others=True)
        after = hand_over(stack, zygote, tmp_path, world, case, step=STEP)
        outcome = after.finish()
        assert_taken_from_memory(after, STEP)
    assert [step["step"] for step in outcome.ranks[0]["steps"]] == list(range(STEP + 1, STEPS + 1))
    assert_counted_once(outcome, case)
    (loss,) = {one.loss for first in world.ranks for one in world.ends[first].steps() if one.step == STEP}
    assert_loss_counts_once(loss, case)


def test_a_script_that_evaluates_after_the_step_is_not_held_up(zygote: Zygote, tmp_path: Path) -> None:
    """The step under way is the last one, so the script evaluates next: with inputs for the shape before."""
    case = make_case(2, 2, kills=[op_kill(1, "B", 2)], task={"steps": STEP})
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({1}, keeps_others=True)
        after = hand_over(stack, zygote, tmp_path, world, case, step=STEP)
        after.world.finish()
        ready = [end.wait_for_number("ready", 1).ready for end in after.ends]
        assert [(one.resumed_step, one.store_bytes) for one in ready] == [(STEP, 0)] * 2


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        pytest.param({0, 1, 2}, "no process gives the inputs of micro-batch 0", marks=pytest.mark.slow),
        ({1}, "no process gives the inputs of micro-batch 0"),
    ],
    ids=["a whole replica and a rank of another one", "a replica whose other rank has ended, too"],
)
def test_without_the_inputs_new_processes_run_the_whole_step(
    lost: set[int], why: str, zygote: Zygote, tmp_path: Path
) -> None:
    kills = [op_kill(rank, "B" if rank == 1 else "F", 1) for rank in sorted(lost)]
    case = make_case(2, 3 if len(lost) > 1 else 2, kills=kills, task=LEDGER, variant="ledger")
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on(lost)
        after = hand_over(stack, zygote, tmp_path, world, case, step=STEP - 1)
        outcome = after.finish()
        assert_taken_from_memory(after, STEP - 1)
        assert_counted_once(outcome, case)
        assert why in world.logs()


@pytest.mark.slow
def test_a_step_is_not_ended_with_other_micro_batches(zygote: Zygote, tmp_path: Path) -> None:
    """Each process has the inputs by whole micro-batches of the shape before."""
    case = make_case(2, 2, kills=[op_kill(1, "B", 1)], task=LEDGER, variant="ledger", micro_batch=4)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, d=1, micro_batch=2), [2, 3], keeps_others=True)
        outcome = hand_over(stack, zygote, tmp_path, world, case, step=STEP - 1).finish()
        assert_counted_once(outcome, case)
        assert "cannot be ended in place: the micro-batches are others" in world.logs()


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {"keeps_inputs": False}, marks=pytest.mark.slow),
        pytest.param(2, {"task": {"counts": True}}, marks=pytest.mark.slow),
    ],
    ids=["one stage", "short steps", "written buffers"],
)
def test_other_losses_end_the_generation_at_once(
    p: int, wanted: dict[str, Any], zygote: Zygote, tmp_path: Path
) -> None:
    case = make_case(p, 2, kills=[op_kill(p - 1, "B", 1)], **wanted)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        left = world.wait_until_left({p - 1})
        assert {(one.gives_only, one.step) for one in left.values()} == {(True, STEP - 1)}
    assert "when the share of the step is done" not in world.logs()
