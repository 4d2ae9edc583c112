"""What a replica has done up to a mark counts, though it is lost, or leaves its share half-way."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kept_case import (
    CHANGES,
    LEDGER,
    STEP,
    VARIANTS,
    Case,
    assert_as_if_undisturbed,
    assert_counted_once,
    op_kill,
    read_forwards,
    start,
)
from survivor_world import SurvivorWorld
from training_world import Zygote
from varuna_proto.v1 import agent_pb2
from waiting import wait_until

EVERY = 2


def marked_case(p: int, d: int, *, finishes: bool = True, marks_every: int = EVERY, **wanted: Any) -> Case:
    """Ranks that copy their sums after so many micro-batches, and go on when the copies are whole."""
    return Case(p, d, marks_every=marks_every, finishes=finishes, **wanted)


def start_marked(stack: ExitStack, zygote: Zygote, folder: Path, case: Case, **named: Any) -> SurvivorWorld:
    return start(stack, zygote, folder, case, copies_shares=True, **named)


def list_redone(world: SurvivorWorld, generation: int, case: Case) -> set[int]:
    """The micro-batches of the step that a generation ran, each at every stage in one replica."""
    forwards, p = read_forwards(world, generation), world.plan.p
    by_stage = [
        sorted(number for rank, first in enumerate(world.ranks) if rank % p == stage for number in forwards[first])
        for stage in range(p)
    ]
    assert all(numbers == sorted(set(numbers)) == by_stage[0] for numbers in by_stage)
    reported = {
        world.ends[first].wait_for_number("ready", generation).ready.micro_batches_redone for first in world.ranks
    }
    assert reported == {len(by_stage[0])}
    return set(by_stage[0])


def after_mark(case: Case, replica: int, count: int) -> set[int]:
    return set(sorted(case.share(replica))[count:])


@pytest.mark.parametrize(
    ("p", "d", "rank"),
    [
        (2, 2, 2),
        *(pytest.param(*lost, marks=pytest.mark.slow) for lost in [(2, 2, 3), (1, 3, 1), (2, 3, 0), (2, 3, 5)]),
    ],
)
def test_a_lost_replica_costs_what_it_has_done_since_its_mark(
    p: int, d: int, rank: int, zygote: Zygote, tmp_path: Path
) -> None:
    """All its stages have the mark. One of them may have the next one, too."""
    case = marked_case(p, d)
    number = len(case.share(rank // p)) - 1
    case.wanted["kills"] = [op_kill(rank, "B" if rank % p == p - 1 else "F", number)]
    with ExitStack() as stack:
        world = start_marked(stack, zygote, tmp_path, case, run_ahead=0)  # the mark comes before its last forward
        world.go_on({rank})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert list_redone(world, 2, case) in [after_mark(case, rank // p, mark) for mark in (2, 4) if mark <= number]


@pytest.mark.slow
def test_a_share_whose_copies_are_lost_with_it_is_run_again(zygote: Zygote, tmp_path: Path) -> None:
    case = marked_case(2, 2, kills=[op_kill(2, "F", 5)], lossy=[2])
    with ExitStack() as stack:
        world = start_marked(stack, zygote, tmp_path, case)
        world.go_on({2})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert list_redone(world, 2, case) == case.share(1)


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow) for n in range(len(VARIANTS))])
def test_marks_are_exact_for_all_kinds_of_training(number: int, zygote: Zygote, tmp_path: Path) -> None:
    task, wanted = VARIANTS[number]
    case = marked_case(2, 2, task={**task, "doubled": True}, finishes=False, kills=[op_kill(0, "B", 5)], **wanted)
    with ExitStack() as stack:
        world = start_marked(stack, zygote, tmp_path, case)
        world.go_on({0})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert list_redone(world, 2, case) <= after_mark(case, 0, 4) | after_mark(case, 1, 2)


@pytest.mark.slow
def test_replicas_leave_at_once_with_their_marks(zygote: Zygote, tmp_path: Path) -> None:
    """Nobody is lost: all are asked to leave in the middle of their shares."""
    case = marked_case(2, 2, finishes=False, op_s=0.1)
    with ExitStack() as stack:
        world = start_marked(stack, zygote, tmp_path, case)
        for end in world.ends.values():
            end.wait_for(lambda message: message.step_done.step == STEP - 1)
        wait_until(lambda: all(len(ran) > EVERY + 1 for ran in read_forwards(world, 1).values()), "a pass under way")
        for end in world.ends.values():
            end.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        world.go_on(set())
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    redone = list_redone(world, 2, case)
    assert redone >= after_mark(case, 0, 4) | after_mark(case, 1, 4)
    assert redone != set(range(case.count))


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow if n else ()) for n in range(len(CHANGES))])
def test_marks_move_to_other_stages(number: int, zygote: Zygote, tmp_path: Path) -> None:
    before, (p, d), task, wanted = CHANGES[number]
    wanted = dict(wanted)
    starts = wanted.pop("stage_starts", ())
    lost, *hit = range(before[0])
    case = marked_case(*before, task={**task, "doubled": True}, finishes=False, kills=[op_kill(lost, "B", 3)], **wanted)
    with ExitStack() as stack:
        world = start_marked(stack, zygote, tmp_path, case)
        world.wait_until_left({lost})
        plan = replace(world.plan, p=p, d=d, stage_starts=starts, recompute=())
        world.go_on_as(plan, [*range(case.p, case.p * case.d), *hit][: p * d])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert set(range(case.count)) - list_redone(world, 2, case) >= set(sorted(case.share(0))[:EVERY])


@pytest.mark.slow
@pytest.mark.parametrize("finishes", [True, False])
@pytest.mark.parametrize("shape", [(3, 2), (1, 6)])
def test_new_processes_get_what_counts_of_the_step(
    shape: tuple[int, int], finishes: bool, zygote: Zygote, tmp_path: Path
) -> None:
    """All ranks leave in the middle of a step, and take other stages with two new processes."""
    case = marked_case(2, 2, finishes=finishes, op_s=0.1, task={"doubled": True})
    with ExitStack() as stack:
        world = start_marked(stack, zygote, tmp_path, case)
        for end in world.ends.values():
            end.wait_for(lambda message: message.step_done.step == STEP - 1)
        wait_until(lambda: all(len(ran) > EVERY + 1 for ran in read_forwards(world, 1).values()), "a pass under way")
        for end in world.ends.values():
            end.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        p, d = shape
        plan = replace(world.plan, p=p, d=d, stage_starts=(), recompute=())
        assert world.grow(plan, [0, None, 1, 2, None, 3]) == STEP - 1
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    redone = {world.ends[rank].wait_for_number("ready", 2).ready.micro_batches_redone for rank in range(4)}
    assert redone == {0} if finishes else redone < set(range(case.count - 2 * EVERY + 1))


LOSSES: dict[str, tuple[tuple[int, int], list[list[dict[str, Any]]]]] = {
    "one replica": ((2, 2), [[op_kill(1, "B", 3)]]),
    "two replicas": ((2, 3), [[op_kill(0, "B", 2), op_kill(3, "B", 2)]]),
    "a replica and its keeper": ((1, 3), [[op_kill(1, "B", 2), op_kill(2, "B", 1)]]),
    "the rest": ((2, 3), [[op_kill(0, "B", 2)], [{**op_kill(2, "B", 0), "count": 2}]]),
    "the meeting": ((2, 3), [[op_kill(1, "B", 2)], [{"rank": 3, "at": "building", "count": 6}]]),
}
"""The shape, and the ranks that are lost, by generation."""


@pytest.mark.parametrize("finishes", [True, False])
@pytest.mark.parametrize(
    "losses", [pytest.param(name, marks=[] if name == "the rest" else pytest.mark.slow) for name in LOSSES]
)
def test_every_example_is_counted_once_with_marks(losses: str, finishes: bool, zygote: Zygote, tmp_path: Path) -> None:
    (p, d), rounds = LOSSES[losses]
    kills = [kill for each in rounds for kill in each]
    case = marked_case(p, d, task=LEDGER, variant="ledger", finishes=finishes, marks_every=1, kills=kills)
    lost: set[int] = set()
    with ExitStack() as stack:
        world = start_marked(stack, zygote, tmp_path, case)
        for each in rounds:
            lost |= {kill["rank"] for kill in each}
            world.go_on(lost)
        assert_counted_once(world.finish(), case)
