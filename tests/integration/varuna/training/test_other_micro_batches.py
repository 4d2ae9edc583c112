"""Survivors go on with another micro-batch in the middle of a step: what they have of it counts, if one micro-batch is
a multiple of the other, and the rest runs with the smaller one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kept_case import (
    LEDGER,
    STEP,
    Case,
    assert_as_if_undisturbed,
    assert_counted_once,
    op_kill,
    read_examples,
    start,
)
from survivor_world import SurvivorWorld
from training_world import Zygote


def list_share(case: Case, replica: int) -> list[int]:
    """The examples of a replica's share of each step."""
    numbers, size, count = case.share(replica), case.micro_batch, case.task.global_batch
    return [example for number in sorted(numbers) for example in range(size * number, min(size * (number + 1), count))]


def assert_redone(
    world: SurvivorWorld, generation: int, micro_batch: int, expected: list[int] | None = None
) -> list[int]:
    """That each of these examples ran once at each stage, in micro-batches of this size, and that the ranks report so
    many of the plan's. Returns the examples."""
    p, ran = world.plan.p, read_examples(world, generation, micro_batch)
    by_stage = [
        sorted(example for rank, first in enumerate(world.ranks) if rank % p == stage for example in ran[first])
        for stage in range(p)
    ]
    assert all(examples == by_stage[0] for examples in by_stage)
    assert len(by_stage[0]) == len(set(by_stage[0]))
    assert expected is None or by_stage[0] == expected
    reported = {
        world.ends[first].wait_for_number("ready", generation).ready.micro_batches_redone for first in world.ranks
    }
    assert reported == {-(-len(by_stage[0]) // world.plan.micro_batch)}
    return by_stage[0]


def assert_timed(world: SurvivorWorld, *, is_timed: bool) -> None:
    """`is_timed`: whether the ranks report what their ops of the rest of the step took."""
    timed = {rank: [bool(one.forward_us) for one in world.ends[rank].steps()] for rank in world.ranks}
    before = STEP - 1
    assert timed == {rank: [True] * before + [is_timed] + [True] * (len(timed[rank]) - STEP) for rank in timed}


RESTS: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]] = [
    ((2, 2), (2, 1), (4, 2), {"dropout": 0.3}),
    ((2, 3), (1, 4), (2, 4), {"padded": True}),
    ((2, 2), (2, 1), (2, 4), {"optimizer": "adamw"}),
    ((2, 3), (4, 1), (4, 1), {"dropout": 0.3, "tied": False}),
    ((1, 3), (2, 1), (6, 2), {"optimizer": "lamb", "offload": True}),
    ((2, 3), (2, 2), (2, 6), {"padded": True}),
]
"""Shapes and micro-batches before and after a loss, and what is trained."""


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow if n else ()) for n in range(len(RESTS))])
def test_only_the_share_of_the_lost_replica_is_run_again(number: int, zygote: Zygote, tmp_path: Path) -> None:
    """Of a global batch whose last micro-batch is smaller."""
    before, (p, d), (old, new), task = RESTS[number]
    lost = before[0] - 1
    task = {"global_batch": 31, "doubled": True, **task}
    case = Case(*before, micro_batch=old, task=task, kills=[op_kill(lost, "B", 1)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({lost})
        plan = replace(world.plan, p=p, d=d, micro_batch=new, recompute=())
        whole, hit = range(case.p, case.p * case.d), range(case.p - 1)
        world.go_on_as(plan, [*whole, *hit][: p * d])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
        assert_timed(world, is_timed=old >= new)
    assert_redone(world, 2, min(old, new), list_share(case, 0))


@pytest.mark.slow
def test_a_step_is_run_again_if_neither_micro_batch_is_a_multiple_of_the_other(zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 2, micro_batch=4, task={"global_batch": 30, "doubled": True}, kills=[op_kill(1, "B", 1)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=2, d=1, micro_batch=6), [2, 3])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_redone(world, 2, 6, list(range(30)))


CHAINS: dict[str, list[tuple[tuple[int, int], int, list[int]]]] = {
    "smaller and smaller": [((2, 2), 2, [2, 3, 4, 5]), ((2, 1), 1, [4, 5])],
    "back to the first one": [((1, 4), 2, [2, 3, 4, 5]), ((3, 1), 4, [2, 4, 5])],
    "larger, then smaller": [((1, 4), 8, [2, 3, 4, 5]), ((1, 3), 1, [5, 2, 4])],
}
"""Of two generations after 2 x 3 with micro-batches of four: the shape, the micro-batch, and the ranks, by their ranks
in the first one."""


@pytest.mark.parametrize(
    "chain", [pytest.param(name, marks=[] if name == "larger, then smaller" else pytest.mark.slow) for name in CHAINS]
)
def test_every_example_is_counted_once_after_a_second_loss_in_the_rest(
    chain: str, zygote: Zygote, tmp_path: Path
) -> None:
    """Rank 1 is lost, and then rank 3 in the rest."""
    kills = [op_kill(1, "B", 0), {**op_kill(3, "F", 0), "count": 2}]
    case = Case(2, 3, micro_batch=4, task={**LEDGER, "global_batch": 26}, variant="ledger", kills=kills)
    sizes, lost = [4], 1
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        for (p, d), size, ranks in CHAINS[chain]:
            world.wait_until_left({lost})
            world.go_on_as(replace(world.plan, p=p, d=d, micro_batch=size, recompute=()), ranks)
            sizes, lost = [*sizes, size], 3
        assert_counted_once(world.finish(), case)
    redone = assert_redone(world, 3, min(sizes))
    assert set(redone) < set(range(26)), "something is kept"


def mark_case(p: int, d: int, micro_batch: int, kills: list[dict[str, Any]], **wanted: Any) -> Case:
    """Ranks that copy their sums after each micro-batch, and go on when the copies of all stages are whole."""
    task = {**LEDGER, "global_batch": 26}
    more = {"variant": "ledger", "marks_every": 1, "finishes": True, **wanted}
    return Case(p, d, micro_batch=micro_batch, task=task, kills=kills, **more)


def test_marks_count_and_are_made_in_the_rest(zygote: Zygote, tmp_path: Path) -> None:
    """2 x 3 lose rank 1 after a mark and go on as 2 x 2. They lose rank 3 after a mark in the rest, and the last ranks
    take other stages."""
    sizes, kills = (4, 1, 2), [op_kill(1, "B", 1), op_kill(3, "F", 2)]
    case = mark_case(2, 3, sizes[0], kills)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case, copies_shares=True)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, d=2, micro_batch=sizes[1]), [2, 3, 4, 5])
        world.wait_until_left({3})
        world.go_on_as(replace(world.plan, p=3, d=1, micro_batch=sizes[2], recompute=()), [4, 5, 2])
        assert_counted_once(world.finish(), case)
    then = assert_redone(world, 3, min(sizes))
    rest = read_examples(world, 2, min(sizes[:2]))
    marked = list_share(case, 0)[: kills[0]["micro_batch"] * sizes[0]]
    assert set(then) < set(list_share(case, 0)) - set(marked), "and a mark of the rest counts"
    assert not set(then) & set(rest[4]), "nor is run again what the other replica has done of the rest"


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (6, 1)])
def test_replicas_leave_with_their_marks(old: int, new: int, zygote: Zygote, tmp_path: Path) -> None:
    case = mark_case(2, 2, old, [op_kill(1, "B", 1)], finishes=False)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case, copies_shares=True)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=3, d=1, micro_batch=new, recompute=()), [3, 0, 2])
        assert_counted_once(world.finish(), case)
    assert set(assert_redone(world, 2, min(old, new))) <= set(range(26)) - set(range(old))


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_one_replica_goes_on_from_its_mark(old: int, new: int, zygote: Zygote, tmp_path: Path) -> None:
    """The sums of the lost stage are in another rank's memory."""
    case = mark_case(3, 1, old, [op_kill(1, "B", 2)], copies_states=True)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case, copies_shares=True, keepers=(1, 2, 0))
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=2, micro_batch=new, recompute=()), [2, 0])
        assert_counted_once(world.finish(), case)
    redone = assert_redone(world, 2, min(old, new))
    assert redone == list(range(redone[0], 26))
    assert redone[0] in (old, 2 * old)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_new_processes_run_their_part_of_the_rest(old: int, new: int, zygote: Zygote, tmp_path: Path) -> None:
    """2 x 2 lose rank 1, and the others take other stages with a new process."""
    task = {**LEDGER, "global_batch": 26}
    case = Case(2, 2, micro_batch=old, task=task, variant="ledger", kills=[op_kill(1, "B", 1)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.ranks = [0, 2, 3]
        plan = replace(world.plan, p=1, d=4, micro_batch=new, recompute=())
        world.grow(plan, [2, 0, 3, None])  # a new rank 1 would end itself, too
        assert_counted_once(world.finish(), case)
        redone = {world.ends[rank].wait_for_number("ready", 2).ready.micro_batches_redone for rank in (0, 2, 3)}
    assert redone == {-(-len(list_share(case, 0)) // new)}
