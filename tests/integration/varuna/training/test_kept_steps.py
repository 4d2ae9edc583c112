"""A lost rank costs the share of its replica: the other replicas finish theirs, and their sums count."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kept_case import (
    CHANGES,
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
from survivor_world import LEAVES_AFTER, SurvivorWorld
from training_world import Zygote
from varuna_planner.schedule.batching import micro_batches
from varuna_proto.v1 import agent_pb2
from waiting import wait_until


def assert_redone(world: SurvivorWorld, generation: int, expected: set[int]) -> None:
    """That each of these micro-batches was run by one replica, and nothing else was."""
    p, forwards = world.world.p, read_forwards(world, generation)
    for stage in range(p):
        ran = [forwards[first] for rank, first in enumerate(world.ranks) if rank % p == stage]
        assert sorted(number for numbers in ran for number in numbers) == sorted(expected)
        assert max(map(len, ran)) - min(map(len, ran)) <= 1


def last_of(case: Case, rank: int) -> int:
    return len(case.share(rank // case.p)) - 1


LOST_RANKS = [(1, 2, 1), (2, 2, 0), (2, 2, 3), (1, 3, 0), (2, 3, 1), (2, 3, 4)]
MOMENTS = ["early", "middle", "late"]
USUAL = [((2, 2, 0), "middle"), ((1, 3, 0), "early")]


@pytest.mark.parametrize(
    ("p", "d", "rank", "when"),
    [
        pytest.param(*lost, when, marks=[] if (lost, when) in USUAL else pytest.mark.slow)
        for lost in LOST_RANKS
        for when in MOMENTS
    ],
)
def test_only_the_share_of_the_lost_replica_is_run_again(
    p: int, d: int, rank: int, when: str, zygote: Zygote, tmp_path: Path
) -> None:
    case = Case(p, d)
    last = last_of(case, rank)
    later = "B" if rank % p == p - 1 else "F"  # after its last F, the stages after it may have their sums already
    op, number = {"early": ("F", 1), "middle": (later, last // 2 + 1), "late": (later, last)}[when]
    case.wanted["kills"] = [op_kill(rank, op, number)]
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({rank})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_redone(world, 2, case.share(rank // p))
    redone = [world.ends[first].wait_for_number("ready", 2).ready.micro_batches_redone for first in world.ranks]
    assert redone == [len(case.share(rank // p))] * len(world.ranks)
    for first in world.ranks:
        if first // p != rank // p:
            assert set(read_forwards(world, 1)[first]) == case.share(first // p)


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=pytest.mark.slow if number else ()) for number in range(len(VARIANTS))]
)
@pytest.mark.parametrize("doubled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_kept_is_exact_for_all_kinds_of_training(
    doubled: bool, number: int, zygote: Zygote, tmp_path: Path
) -> None:
    task, wanted = VARIANTS[number]
    task = {**task, "doubled": doubled}
    case = Case(2, 2, task=task, kills=[op_kill(1, "B", 2)], **wanted)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({1})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_redone(world, 2, case.share(0))


@pytest.mark.slow
def test_a_model_that_writes_buffers_runs_the_whole_step_again(zygote: Zygote, tmp_path: Path) -> None:
    case = Case(1, 2, task={"counts": True}, kills=[op_kill(1, "B", 2)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({1})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_redone(world, 2, set(range(case.count)))


@pytest.mark.slow
def test_a_second_replica_is_hit_while_the_others_finish(zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 3, kills=[op_kill(0, "F", 1), op_kill(3, "B", 2)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({0, 3})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_redone(world, 2, case.share(0) | case.share(1))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 5])
def test_a_second_rank_is_lost_in_what_is_left_of_the_step(rank: int, zygote: Zygote, tmp_path: Path) -> None:
    """What its replica had kept from the first generation is lost with it, and the other one keeps both parts."""
    in_rest = {**op_kill(rank, "F", 1), "count": 2}
    case = Case(2, 3, kills=[op_kill(1, "B", 0), in_rest])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({1})
        rest = {first: set(numbers) for first, numbers in read_forwards(world, 2).items()}
        world.go_on({1, rank})
        rest = {first: set(numbers) for first, numbers in read_forwards(world, 2).items()}
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    kept = set.intersection(*(case.share(first // 2) | rest[first] for first in world.ranks))
    assert_redone(world, 3, set(range(case.count)) - kept)
    assert kept


@pytest.mark.parametrize(
    "at",
    [
        pytest.param("all-reduce", marks=pytest.mark.slow),
        pytest.param("before the sums", marks=pytest.mark.slow),
        pytest.param("agreement", marks=pytest.mark.slow),
        "agreed",
    ],
)
@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_is_lost_at_the_end_of_a_step(at: str, rank: int, zygote: Zygote, tmp_path: Path) -> None:
    case = Case(2, 2, kills=[{"rank": rank, "at": at, "step": STEP}])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({rank})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)


def test_a_replica_that_waits_for_the_sums_keeps_its_share(zygote: Zygote, tmp_path: Path) -> None:
    case = Case(1, 3, op_s=0.0, slow={"rank": 1, "op_s": 0.1}, kills=[op_kill(1, "B", 3)])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.go_on({1})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_redone(world, 2, case.share(1))


@pytest.mark.slow
@pytest.mark.parametrize(("p", "d"), [(2, 2), (1, 3)])
def test_ranks_that_are_asked_to_leave_finish_their_shares(p: int, d: int, zygote: Zygote, tmp_path: Path) -> None:
    case = Case(p, d, op_s=0.1)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        for end in world.ends.values():
            end.wait_for(lambda message: message.step_done.step == STEP - 1)
        wait_until(lambda: all(len(ran) > 1 for ran in read_forwards(world, 1).values()), "a pass under way")
        for end in world.ends.values():
            end.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        world.go_on(set())
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    assert_redone(world, 2, set())


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow if n else ()) for n in range(len(CHANGES))])
@pytest.mark.parametrize("doubled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_kept_moves_to_other_stages(doubled: bool, number: int, zygote: Zygote, tmp_path: Path) -> None:
    before, (p, d), task, wanted = CHANGES[number]
    wanted = dict(wanted)
    starts = wanted.pop("stage_starts", ())
    case = Case(*before, task={**task, "doubled": doubled}, kills=[op_kill(1, "B", 2)], **wanted)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        plan = replace(world.plan, p=p, d=d, stage_starts=starts, recompute=())
        hit = [rank for rank in range(case.p) if rank != 1]
        world.go_on_as(plan, [*range(case.p, case.p * case.d), *hit][: p * d] if case.p > 1 else [2, 0])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    redone = [world.ends[first].wait_for_number("ready", 2).ready.micro_batches_redone for first in world.ranks]
    assert redone == [len(case.share(1 // case.p))] * len(world.ranks)
    ran = read_forwards(world, 2)
    for stage in range(p):
        numbers = [ran[first] for rank, first in enumerate(world.ranks) if rank % p == stage]
        assert {number for each in numbers for number in each} == case.share(1 // case.p)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "has_share"), [(2, True), (3, False)])
def test_another_loss_in_other_stages_costs_what_its_replica_has(
    lost: int, has_share: bool, zygote: Zygote, tmp_path: Path
) -> None:
    """2 x 3 lose rank 1 and go on as 1 x 4, where ranks 0 and 2 get the shares of the other two replicas."""
    in_rest = {**op_kill(lost, "F", 0), "count": 2}
    case = Case(2, 3, kills=[op_kill(1, "B", 2), in_rest])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=1, d=4, recompute=()), [2, 3, 4, 5])
        world.go_on({1, lost})
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    (redone,) = {world.ends[first].wait_for_number("ready", 3).ready.micro_batches_redone for first in world.ranks}
    rest = max(map(len, micro_batches(len(case.share(0)), 1, 4)))
    assert rest - 1 <= redone - has_share * len(case.share(1)) <= rest


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 1), (1, 3)], ids=str)
def test_another_loss_in_other_stages_takes_the_others_to_a_third_shape(
    shape: tuple[int, int], zygote: Zygote, tmp_path: Path
) -> None:
    """2 x 3 lose rank 1, go on as 1 x 4, and lose rank 3, which has no share: what the others have moves again."""
    (p, d), in_rest = shape, {**op_kill(3, "F", 0), "count": 2}
    case = Case(2, 3, kills=[op_kill(1, "B", 2), in_rest])
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=1, d=4, recompute=()), [2, 3, 4, 5])
        world.go_on_as(replace(world.plan, p=p, d=d, recompute=()), [2, 4, 5])
        assert_as_if_undisturbed(zygote, tmp_path, world, case)
    (redone,) = {world.ends[first].wait_for_number("ready", 3).ready.micro_batches_redone for first in world.ranks}
    rest = max(map(len, micro_batches(len(case.share(0)), 1, 4)))
    assert rest - 1 <= redone <= rest


PHASES: dict[str, tuple[tuple[int, int], list[list[dict[str, Any]]]]] = {
    "a pass": ((2, 2), [[op_kill(1, "B", 2)]]),
    "the sums": ((2, 2), [[{"rank": 2, "at": "all-reduce", "step": STEP}]]),
    "the agreement": ((2, 2), [[{"rank": 0, "at": "agreement", "step": STEP}]]),
    "the update": ((2, 2), [[{"rank": 3, "at": "agreed", "step": STEP}]]),
    "two replicas": ((2, 3), [[op_kill(0, "F", 1), op_kill(3, "B", 2)]]),
    "the meeting": ((2, 3), [[op_kill(1, "B", 2)], [{"rank": 3, "at": "building", "count": 6}]]),
    "the rest": ((2, 3), [[op_kill(1, "B", 0)], [{**op_kill(2, "F", 1), "count": 2}]]),
}
"""The shape, and the ranks that are lost one after the other in one step, by where the last one is lost."""


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=[] if phase == "the rest" else pytest.mark.slow) for phase in PHASES]
)
def test_every_example_of_every_step_is_counted_once(phase: str, zygote: Zygote, tmp_path: Path) -> None:
    (p, d), losses = PHASES[phase]
    case = Case(p, d, task=LEDGER, variant="ledger", kills=[kill for kills in losses for kill in kills])
    lost: set[int] = set()
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        for kills in losses:
            lost |= {kill["rank"] for kill in kills}
            world.go_on(lost)
        assert_counted_once(world.finish(), case)


@pytest.mark.slow
def test_every_example_is_counted_once_when_a_rank_is_lost_while_sums_move(zygote: Zygote, tmp_path: Path) -> None:
    """The others have taken no stage yet. They give the state to new processes, which run the whole step."""
    wanted = {"variant": "ledger", "dies_in_move": 2}
    case = Case(2, 2, task=LEDGER, kills=[op_kill(1, "B", 2)], **wanted)
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        world.wait_until_left({1})
        world.go_on_as(replace(world.plan, p=3, d=1, recompute=()), [3, 0, 2])
        left = [world.ends[first].wait_for_number("generation_left", 2).generation_left for first in (3, 0)]
        assert [(one.gives_only, one.step) for one in left] == [(True, STEP - 1)] * 2
        more = {"script": SCRIPT, "wanted": {"variant": "ledger"}, "generation": 3, "holders": (0, 1)}
        after = LeavingGeneration(stack, zygote, tmp_path, case.task, 2, 1, **more)
        for first in (3, 0):
            world.ends[first].give_state(after.world.holder_environment())
        outcome = after.finish()
        assert_taken_from_memory(after, STEP - 1)
        assert [step["step"] for step in outcome.ranks[0]["steps"]] == list(range(STEP, STEPS + 1))
        assert_counted_once(outcome, case)


@pytest.mark.parametrize("is_lost", [pytest.param(True, marks=pytest.mark.slow), False])
def test_every_example_is_counted_once_in_other_stages(is_lost: bool, zygote: Zygote, tmp_path: Path) -> None:
    """`is_lost`: with a rank, in the middle of a step. Otherwise all ranks leave between two steps, and the script
    evaluates the batch of the step that went on in the other shape."""
    kills = [op_kill(1, "B", 2)] if is_lost else []
    case = Case(2, 2, task=LEDGER, variant="ledger", kills=kills, **({} if is_lost else LEAVES_AFTER))
    with ExitStack() as stack:
        world = start(stack, zygote, tmp_path, case)
        if not is_lost:
            world.ends[0].wait_for(lambda message: message.step_done.step >= STEP)
            for end in world.ends.values():
                end.send_leave(agent_pb2.STOP_MODE_HOLD_FIRST, keep_state=True)
        world.wait_until_left({1} if is_lost else set())
        world.go_on_as(replace(world.plan, p=3, d=1, recompute=()), [3, 0, 2])
        assert_counted_once(world.finish(), case)
