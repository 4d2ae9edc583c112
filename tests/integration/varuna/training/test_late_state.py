"""After a move in the middle of a step, sums and what only the update reads come while the passes run."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import late_state_script
from leaving_generation import finish_in_new_processes
from small_gpt import Task, train_plainly
from survivor_world import LEAVES_AFTER, SurvivorWorld
from training_world import Zygote, assert_exact
from varuna_proto.v1 import agent_pb2

SCRIPT = Path(late_state_script.__file__)
STEPS, LOST_IN = 6, 4


def lose_one(
    stack: ExitStack,
    zygote: Zygote,
    folder: Path,
    task: Task,
    late: dict[str, Any],
    *,
    p: int = 3,
    keepers: tuple[int, ...] = (),
) -> SurvivorWorld:
    """2×2 loses rank 1 in a step that the other replica has passed. The others take the stages of 3×1, or of another
    `p`.

    `keepers`: of copies of the new stages.
    """
    wanted = {"die": {"rank": 1, "step": LOST_IN}, "passes_first": [2, 3], "late": late}
    world = SurvivorWorld(stack, zygote, folder, task, 2, 2, script=SCRIPT, wanted=wanted)
    world.wait_until_left({1})
    world.go_on_as(replace(world.plan, p=p, d=3 // p), [3, 0, 2], keepers=keepers)
    return world


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"optimizer": "lamb", "offload": True, "tied": True}, marks=pytest.mark.slow),
        pytest.param({"groups": True, "frozen": True, "checkpointed": True}, marks=pytest.mark.slow),
    ],
    ids=["plain", "offload", "groups"],
)
def test_passes_run_before_the_optimizers_state_is_there(more: dict[str, Any], zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS, doubled=True, clip=0.5, **more)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {"after_forward": [0, 2, 3]})
        assert_exact(world.finish(), train_plainly(task), task)
        came = {rank: json.loads((world.world.out / f"late.rank{rank}.json").read_text()) for rank in (0, 2, 3)}
        assert all(one["forwards"] for one in came.values())
        ready = {rank: world.ends[rank].wait_for_number("ready", 2).ready for rank in came}
        assert {rank: one.late_bytes for rank, one in ready.items()} == {
            rank: one["bytes"] for rank, one in came.items()
        }
        assert any(one.late_bytes > one.peer_bytes > 0 for one in ready.values())


def test_replicas_copy_their_states_when_these_are_no_longer_late(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS + 1)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {"copies_states": True}, p=1, keepers=(1,))
        assert_exact(world.finish(), train_plainly(task), task)
        ready = world.ends[0].wait_for_number("ready", 2).ready
        assert ready.late_bytes > 0
        newest = world.ends[0].steps()[-1]
        assert newest.copied_step >= LOST_IN
        assert not newest.copies_obstacle


def test_one_replica_that_copies_its_states_has_them_before_the_passes(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {}, keepers=(1, 2, 0))
        assert_exact(world.finish(), train_plainly(task), task)
        assert world.ends[0].wait_for_number("ready", 2).ready.late_bytes == 0


@pytest.mark.parametrize(
    ("held_until", "more"),
    [
        ("sums_after_backward", {"tied": True}),
        pytest.param("sums_after_backward", {"optimizer": "lamb", "offload": True}, marks=pytest.mark.slow),
        pytest.param("sums_after_passes", {"groups": True, "frozen": True}, marks=pytest.mark.slow),
        pytest.param("sums_after_passes", {"padded": True}, marks=pytest.mark.slow),
    ],
)
def test_passes_run_before_the_sums_are_there(
    held_until: str, more: dict[str, Any], zygote: Zygote, tmp_path: Path
) -> None:
    task = Task(steps=STEPS, doubled=True, clip=0.5, **more)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {held_until: [0, 2, 3]})
        assert_exact(world.finish(), train_plainly(task), task)
        came = [json.loads((world.world.out / f"late.rank{rank}.json").read_text()) for rank in (0, 2, 3)]
        least = [1, 1, 1] if held_until == "sums_after_backward" else [one["forwards"] for one in came]
        assert [one["backwards_before_sums"] >= count > 0 for one, count in zip(came, least, strict=True)] == [True] * 3


def test_a_rank_is_lost_before_others_have_their_sums(zygote: Zygote, tmp_path: Path) -> None:
    """The whole state is there, as where new processes come: the others go on in place, without what the sums had."""
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        late = {"sums_never": [3], "dies": [2], "only_sums": True}
        wanted = {"die": {"rank": 1, "step": LOST_IN}, "passes_first": [2, 3, 4, 5], "late": late}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 3, script=SCRIPT, wanted=wanted)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=1, d=4), [3, 0, 2, 5])
        world.go_on({2})
        assert_exact(world.finish(), train_plainly(task), task)
        left = [world.ends[first].wait_for_number("generation_left", 2).generation_left for first in (0, 3, 5)]
        assert [(one.gives_only, one.step) for one in left] == [(False, LOST_IN - 1)] * 3


def grow_late(
    stack: ExitStack,
    zygote: Zygote,
    folder: Path,
    task: Task,
    late: dict[str, Any],
    of_new: dict[str, Any] | None = None,
    **wanted: Any,
) -> tuple[SurvivorWorld, int]:
    """1×2 goes on as 3×1, with a new process as rank 1, after the step that is returned.

    `late`: of the first ranks; `of_new`: of the new process, if that is not the same.
    """
    wanted |= {"late": late, **LEAVES_AFTER}
    world = SurvivorWorld(stack, zygote, folder, task, 1, 2, script=SCRIPT, wanted=wanted)
    world.leave_at_boundary()
    late_of_new = {} if of_new is None else {"late": of_new}
    return world, world.grow(replace(world.plan, p=3, d=1), [1, None, 0], wanted=late_of_new)


NEW = 2
"""The new process, among all."""


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"optimizer": "lamb", "offload": True, "tied": True}, marks=pytest.mark.slow),
        pytest.param({"groups": True, "frozen": True, "checkpointed": True}, marks=pytest.mark.slow),
    ],
    ids=["plain", "offload", "groups"],
)
def test_passes_run_before_a_new_process_has_the_optimizers_state(
    more: dict[str, Any], zygote: Zygote, tmp_path: Path
) -> None:
    task = Task(steps=STEPS, doubled=True, clip=0.5, **more)
    with ExitStack() as stack:
        world, _ = grow_late(stack, zygote, tmp_path, task, {"after_forward": [0, 1]})
        assert_exact(world.finish(), train_plainly(task), task)
        came = json.loads((world.others[0].out / "late.rank1.json").read_text())
        ready = world.ends[NEW].wait_for_number("ready", 1).ready
        assert came["forwards"]
        assert ready.late_bytes == came["bytes"]
        assert ready.peer_bytes > 0
        assert (ready.late_bytes > ready.peer_bytes) == (not task.frozen), "all of its stage is frozen"


def test_a_script_that_looks_into_late_state_waits_for_it(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        world, _ = grow_late(stack, zygote, tmp_path, task, {}, reads_state=True)
        assert_exact(world.finish(), train_plainly(task), task)
        assert world.ends[NEW].wait_for_number("ready", 1).ready.late_bytes > 0


def test_a_script_looks_into_late_state_where_replicas_copy_theirs(zygote: Zygote, tmp_path: Path) -> None:
    """All ranks meet for their first copies in the same step, though one of them has its whole state earlier."""
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        wanted = {**LEAVES_AFTER, "late": {}, "reads_state": True}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 1, 3, script=SCRIPT, wanted=wanted, keepers=(1,))
        world.leave_at_boundary()
        world.grow(replace(world.plan, p=2, d=2), [0, None, 1, 2])
        assert_exact(world.finish(), train_plainly(task), task)
        assert world.ends[3].wait_for_number("ready", 1).ready.late_bytes > 0


@pytest.mark.parametrize(
    ("late", "of_new", "reads_state"),
    [
        ({"never": [0]}, {"dies": [1]}, False),
        ({}, {"fails": [1]}, False),
        ({"dies": [1]}, {"never": [1]}, False),
        ({"dies": [1]}, {"never": [1]}, True),
    ],
    ids=["it dies", "it cannot have it", "another one dies", "another one dies while the script waits for it"],
)
def test_a_new_process_without_its_late_state_ends(
    late: dict[str, Any], of_new: dict[str, Any], reads_state: bool, zygote: Zygote, tmp_path: Path
) -> None:
    """The others have the whole state of the stages that they had."""
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        world, step = grow_late(stack, zygote, tmp_path, task, late, of_new, reads_state=reads_state)
        finish_with_state_before(stack, zygote, tmp_path, world, {NEW, *late.get("dies", ())}, step)
        assert not world.ends[NEW].list_messages("generation_left")


def test_a_registered_state_that_looks_into_late_state_ends_the_move(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        world, step = grow_late(stack, zygote, tmp_path, task, {}, reads_state_loading=True)
        obstacle = world.ends[NEW].wait_for_number("script_obstacle", 1).script_obstacle.reason
        assert "a registered state looks into the optimizer's when it is loaded" in obstacle
        for first in (0, 1):  # as the manager does when the new process has ended
            world.ends[first].send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        finish_with_state_before(stack, zygote, tmp_path, world, {NEW}, step)


def finish_with_state_before(
    stack: ExitStack, zygote: Zygote, folder: Path, world: SurvivorWorld, lost: set[int], step: int = LOST_IN - 1
) -> None:
    """The ranks of 3×1 but the `lost` ones only give the state that they had before, after `step`."""
    holders = {rank: first for rank, first in enumerate(world.ranks) if first not in lost}
    left = finish_in_new_processes(stack, zygote, folder, world, holders)
    assert [(one.gives_only, one.step) for one in left] == [(True, step)] * len(holders)


def test_a_rank_is_lost_before_all_have_their_late_state(zygote: Zygote, tmp_path: Path) -> None:
    """The others have the whole state of the stages that they had."""
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {"never": [3], "dies": [2]})
        finish_with_state_before(stack, zygote, tmp_path, world, {2})


def test_late_state_that_cannot_be_had_ends_the_move(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {"fails": [0]})
        finish_with_state_before(stack, zygote, tmp_path, world, set())


def test_a_rank_is_lost_when_all_have_their_late_state(zygote: Zygote, tmp_path: Path) -> None:
    """Before the update: the others go on with their new stages, and with what they have of the step."""
    task = Task(steps=STEPS, doubled=True)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {"dies_at_end": [2]}, p=1)
        left = world.wait_until_left({2})
        assert {(one.gives_only, one.step) for one in left.values()} == {(False, LOST_IN - 1)}
        world.go_on_as(replace(world.plan, p=1, d=2), [0, 3])
        assert_exact(world.finish(), train_plainly(task), task)


@pytest.mark.parametrize(("p", "lost"), [(3, 2), (1, 3)], ids=["the stages before", "the new ones"])
def test_new_processes_take_whichever_stages_are_left_when_all_have_moved(
    p: int, lost: int, zygote: Zygote, tmp_path: Path
) -> None:
    """Before the update: two of 3×1 have all stages of 2×2, and each of 1×3 has all of the model."""
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        world = lose_one(stack, zygote, tmp_path, task, {"dies_at_end": [lost]}, p=p)
        holders = {rank: first for rank, first in enumerate(world.ranks) if first != lost}
        left = finish_in_new_processes(stack, zygote, tmp_path, world, holders)
        assert [(one.gives_only, one.step) for one in left] == [(False, LOST_IN - 1)] * 2
