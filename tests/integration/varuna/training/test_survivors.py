"""Survivors of a lost rank go on in the same process, and the result is that of a run without a loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from small_gpt import Task, train_plainly
from survivor_world import SurvivorWorld
from training_kills import SCRIPT, Kill, N, op_kills, phase_kills
from training_world import Outcome, Zygote, assert_exact
from varuna_proto.environment import EXIT_PEER_LOST
from varuna_proto.v1 import agent_pb2

ROUNDS = 6
STEPS = 6
"""Enough for a few steps before a loss and a few after it."""


def assert_as_if_undisturbed(world: SurvivorWorld, task: Task) -> None:
    assert_exact(world.finish(), train_plainly(task), task)


@pytest.mark.parametrize("lost", [*(pytest.param(rank, marks=pytest.mark.slow) for rank in range(3)), 3])
def test_survivors_finish_the_training_as_if_no_rank_had_been_lost(lost: int, zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        wanted = {"die": {"rank": lost, "step": 3}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        held = world.go_on({lost})
        assert_as_if_undisturbed(world, task)
    assert held == [2] * len(held)
    messages = [world.ends[first].messages for first in world.ranks]
    assert all(
        [message.ready.resumed_step for message in sent if message.HasField("ready")] == [0, 2] for sent in messages
    )
    assert world.world.ends()[lost]["code"] not in (0, EXIT_PEER_LOST)


def list_step_kills(p: int, d: int) -> list[Kill]:
    """Every point of a step at which a rank can be lost, for every rank."""
    in_step = ("sending", "receiving", "all-reduce", "before the sums", "agreement", "agreed")
    kills = [kill for rank in range(p * d) for kill in [*op_kills(p, d, rank), *phase_kills(p, d, rank)]]
    return [kill for kill in kills if kill.at == "op" or kill.at in in_step]


def assert_survives(zygote: Zygote, folder: Path, kill: Kill) -> None:
    task = Task(steps=4, global_batch=2 * N * kill.d, tied=True, clip=0.5)
    wanted = {"kill": {"rank": kill.rank, "at": kill.at, **kill.details}}
    more = {"script": SCRIPT, "recompute": (True,) * (kill.p - 1) + (False,), "run_ahead": 1}
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, folder, task, kill.p, kill.d, wanted=wanted, **more)
        world.go_on({kill.rank})
        assert_as_if_undisturbed(world, task)


STEP_KILLS = list_step_kills(2, 2)
SAMPLE = [STEP_KILLS[index] for index in (1, 20, 39, 58)] + [
    next(kill for kill in STEP_KILLS if (kill.at, kill.rank) == place)
    for place in (("agreed", 0), ("agreed", 3), ("agreement", 1), ("all-reduce", 2), ("before the sums", 0))
]


@pytest.mark.parametrize(
    "kill",
    [pytest.param(kill, marks=pytest.mark.slow if number % 3 else ()) for number, kill in enumerate(SAMPLE)],
    ids=str,
)
def test_a_rank_is_lost_in_the_middle_of_a_step(kill: Kill, zygote: Zygote, tmp_path: Path) -> None:
    assert_survives(zygote, tmp_path, kill)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_is_lost_anywhere_in_a_step(rank: int, zygote: Zygote, tmp_path: Path) -> None:
    for number, kill in enumerate(kill for kill in STEP_KILLS if kill.rank == rank):
        assert_survives(zygote, tmp_path / str(number), kill)


@pytest.mark.slow
def test_ranks_are_lost_one_after_the_other_until_one_replica_is_left(zygote: Zygote, tmp_path: Path) -> None:
    task = Task(steps=8, global_batch=12)
    with ExitStack() as stack:
        wanted = {"dies": [{"rank": 1, "step": 3}, {"rank": 2, "step": 5}]}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 3, wanted=wanted)
        world.go_on({1})
        assert len(world.ranks) == 4
        world.go_on({1, 2})
        assert len(world.ranks) == 2
        assert_as_if_undisturbed(world, task)


def test_a_second_rank_is_lost_while_the_others_meet(zygote: Zygote, tmp_path: Path) -> None:
    """It never joins the meeting: the others leave again at the agent's command, and go on without it."""
    task = Task(steps=STEPS, global_batch=12)
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, tmp_path, task, 1, 3, wanted={"die": {"rank": 0, "step": 3}})
        world.go_on({0}, absent={1})
        world.ends[2].wait_for_number("hello", 2)
        world.ends[2].send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
        world.ends[1].hang_up()
        world.go_on({0, 1})
        assert_as_if_undisturbed(world, task)


def test_a_rank_that_has_missed_an_agreement_gets_its_totals_from_the_others(zygote: Zygote, tmp_path: Path) -> None:
    """They have finished that step and are in the next one."""
    task = Task(steps=STEPS, clip=0.5)
    with ExitStack() as stack:
        wanted = {"misses_agreement": {"rank": 1, "step": 3}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        held = world.go_on(set())
        assert_as_if_undisturbed(world, task)
    assert held == [3, 2, 3, 3]


def test_a_rank_makes_an_agreed_update_after_the_others(zygote: Zygote, tmp_path: Path) -> None:
    """They have also made the model's buffers equal already, and it must not wait for them there."""
    task = Task(steps=STEPS, counts=True)
    with ExitStack() as stack:
        wanted = {"misses_update": {"rank": 1, "step": 3}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 1, 3, wanted=wanted)
        held = world.go_on(set())
        assert_as_if_undisturbed(world, task)
    assert held == [3, 3, 3]


def test_a_rank_is_lost_between_an_evaluation_and_the_next_step(zygote: Zygote, tmp_path: Path) -> None:
    """The evaluation has had batches of another `Batches`, more than a process remembers."""
    task = Task(steps=STEPS)
    with ExitStack() as stack:
        wanted = {"validates": 3, "rests": 4, "die": {"rank": 1, "step": 4}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 1, 2, wanted=wanted)
        left = world.wait_until_left({1})
        (world.world.out / "rested").touch()
        world.go_on({1})
        assert_as_if_undisturbed(world, task)
        assert not world.ends[0].list_messages("script_obstacle")
    assert (left[0].gives_only, left[0].step) == (False, 3)


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        ({"dies_validating": {"rank": 1, "step": 3}}, {1}),
        ({"misses_evaluation": {"rank": 1, "step": 3, "number": 1, "passed": []}}, set()),
        ({"misses_evaluation": {"rank": 1, "step": 3, "number": 3, "passed": [2, 3]}}, set()),
    ],
    ids=["a rank dies", "others have agreed and are in the next one", "others have agreed and are in the next step"],
)
def test_an_evaluation_goes_on_when_it_loses_ranks(
    fault: dict[str, object], lost: set[int], zygote: Zygote, tmp_path: Path
) -> None:
    assert_evaluations_go_on(zygote, tmp_path, fault, lambda world: world.go_on(lost))


def test_ranks_take_other_stages_in_an_evaluation(zygote: Zygote, tmp_path: Path) -> None:
    def move(world: SurvivorWorld) -> list[int]:
        return world.go_on_as(replace(world.plan, p=3, d=1, recompute=()), [3, 0, 2])

    fault = {"dies_validating": {"rank": 1, "step": 3}}
    assert_evaluations_go_on(zygote, tmp_path, fault, move, averages=True, varuna={"ema": 0.9})


def assert_evaluations_go_on(
    zygote: Zygote,
    folder: Path,
    fault: dict[str, object],
    go_on: Callable[[SurvivorWorld], list[int]],
    **more: object,
) -> None:
    """With a fault in the evaluations after step 3, which draw random numbers."""
    task, wanted = Task(steps=STEPS, noisy=True), {"validates": 3, **more}
    with ExitStack() as stack:
        undisturbed = SurvivorWorld(stack, zygote, folder / "undisturbed", task, 2, 2, wanted=wanted).finish()
    with ExitStack() as stack:
        world = SurvivorWorld(stack, zygote, folder, task, 2, 2, wanted={**wanted, **fault})
        held = go_on(world)
        outcome = world.finish()
        assert not any(end.list_messages("script_obstacle") for end in world.ends.values())
    assert held == [3] * len(held)
    assert_exact(outcome, train_plainly(task), task)
    assert_evaluated(outcome, undisturbed)


def assert_evaluated(outcome: Outcome, undisturbed: Outcome) -> None:
    """All evaluations have the losses that they have without a fault, and the same ones on all ranks."""
    expected = [step["validated"] for step in undisturbed.ranks[0]["steps"]]
    assert [len(losses) for losses in expected] == [3] * STEPS
    found = [[step["validated"] for step in rank["steps"]] for rank in outcome.ranks]
    assert found[0] == [pytest.approx(losses, rel=1e-5) for losses in expected]
    assert all(losses == found[0] for losses in found), "all ranks have the same, to the last bit"


def test_an_evaluation_with_inputs_of_the_scripts_own_ends_with_its_generation(zygote: Zygote, tmp_path: Path) -> None:
    with ExitStack() as stack:
        wanted = {"validates": 3, "copies_validation": True, "dies_validating": {"rank": 1, "step": 3}}
        world = SurvivorWorld(stack, zygote, tmp_path, Task(steps=STEPS), 1, 2, wanted=wanted)
        assert world.world.exit_codes()[0] == EXIT_PEER_LOST
        assert "this process ends with its generation: it is in evaluate()" in world.logs()
        assert not world.ends[0].list_messages("script_obstacle")


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 6, 7, 8], ids="before its connection number {}".format)
def test_a_second_rank_dies_while_the_others_connect(count: int, zygote: Zygote, tmp_path: Path) -> None:
    """In the first generation each rank makes four connections: two links, one of its replicas, one of all."""
    task = Task(steps=STEPS, global_batch=12)
    with ExitStack() as stack:
        wanted = {"die": {"rank": 1, "step": 3}, "kill": {"rank": 3, "at": "building", "count": count}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 3, wanted=wanted, script=SCRIPT)
        world.go_on({1})
        world.go_on({1, 3})
        assert len(world.ranks) == 2
        assert_as_if_undisturbed(world, task)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"copies_batches": True}, "does not pass the batches"),
        ({"asks_for_shape": True}, "get_varuna_config"),
        ({"accumulate": 2}, "accumulates gradients"),
    ],
)
def test_a_script_that_cannot_follow_another_shape_only_gives_its_state(
    wanted: dict[str, object], reason: str, zygote: Zygote, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        wanted = {**wanted, "die": {"rank": 1, "step": 3}}
        world = SurvivorWorld(stack, zygote, tmp_path, Task(steps=STEPS), 1, 2, wanted=wanted)
        left = world.ends[0].wait_for_number("generation_left", 1).generation_left
        assert (left.gives_only, left.exit_code, left.step) == (True, EXIT_PEER_LOST, 2)
        assert reason in world.world.logs()
        assert reason in world.ends[0].wait_for_number("script_obstacle", 1).script_obstacle.reason


def test_a_script_that_accumulates_is_named_where_its_process_ends_too(zygote: Zygote, tmp_path: Path) -> None:
    """The loss comes between the steps of one update."""
    with ExitStack() as stack:
        wanted = {"accumulate": 2, "die": {"rank": 1, "step": 4}}
        world = SurvivorWorld(stack, zygote, tmp_path, Task(steps=STEPS), 1, 2, wanted=wanted)
        said = world.ends[0].wait_for_number("script_obstacle", 1).script_obstacle
        assert said.reason == "the script accumulates gradients; a larger global batch does the same"
        assert world.world.exit_codes()[0] == EXIT_PEER_LOST


def test_no_process_stays_where_the_job_says_so(zygote: Zygote, tmp_path: Path) -> None:
    with ExitStack() as stack:
        wanted, environ = {"die": {"rank": 1, "step": 3}}, {"VARUNA_IN_PLACE": "0"}
        world = SurvivorWorld(stack, zygote, tmp_path, Task(steps=STEPS), 1, 2, wanted=wanted, environ=environ)
        assert world.world.exit_codes()[0] == EXIT_PEER_LOST
        assert not any(message.HasField("generation_left") for message in world.ends[0].messages)


def test_nothing_of_a_generation_is_left_in_the_process(zygote: Zygote, tmp_path: Path) -> None:
    """Its threads and descriptors are gone."""
    task = Task(steps=ROUNDS + 4, global_batch=12)
    with ExitStack() as stack:
        wanted = {"counts": True, "leaves_after": {"step": 3, "generations": ROUNDS}}
        world = SurvivorWorld(stack, zygote, tmp_path, task, 2, 2, wanted=wanted)
        for number in range(ROUNDS):
            for end in world.ends.values():
                end.wait_for_number("ready", number + 1)
                end.wait_for(lambda message, least=2 + number: message.step_done.step >= least)
            for end in world.ends.values():
                end.send_leave(agent_pb2.STOP_MODE_LEAVE_NOW, keep_state=True)
            world.go_on(set())
        assert_as_if_undisturbed(world, task)
    unclean = []
    for rank in range(4):
        counts = json.loads((world.world.out / f"rank{rank}.json").read_text())["counts"]
        logs = [path.read_text() for path in world.world.out.glob(f"*rank{rank}.log")]
        unclean.append(sum(log.count("connections of the ended generation are still in use") for log in logs))
        if not unclean[-1]:
            assert counts[-1]["threads"] <= counts[0]["threads"], counts
            assert counts[-1]["descriptors"] <= counts[0]["descriptors"], counts
    assert sum(unclean) <= ROUNDS, "gloo leaves a thread in a receive now and then, and the log says so"
