"""Whether a generation leaves for another shape in the middle of its step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decision_views import NOW, decide, decide_when_prepared, devices, generation, job, plan_for, proposal, vm, worker
from varuna_manager.domain.actions import StartGeneration, StopGeneration
from varuna_manager.domain.leaving_step import predict_rest_s
from varuna_manager.domain.newcomers import NewcomersView, WantedNewcomers
from varuna_manager.domain.observed import GenerationView, JobView, StopView
from varuna_manager.domain.states import EndCause, ExitCause, GenerationState, StopMode
from varuna_planner.liveput.morph_cost import MovingTime, StateMoves
from varuna_planner.schedule.batching import count_micro_batches

HERE = devices("a", "b")
STEP_S = 100.0


def running(**changes: Any) -> GenerationView:
    """Of one worker, 40 s into a step of 100 s."""
    return generation(worker(0, "a"), **{"mean_step_s": STEP_S, "stepped_at": NOW - 40.0, **changes})


def growing(view: GenerationView, *, rate: float = 16.0, moving_s: float = 15.0, **changes: Any) -> JobView:
    """It has 8 examples/s now."""
    proposed = replace(proposal(HERE, rate), moves=StateMoves(2 * moving_s, MovingTime(moving_s)))
    return job(view, devices=HERE, proposal=proposed, **changes)


def find_stop(view: JobView) -> StopGeneration:
    (stop,) = decide_when_prepared(view, vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.cause is EndCause.GROWTH
    return stop


def test_a_long_step_is_left_in_its_middle_and_the_reason_says_what_that_is_worth() -> None:
    """Its sums come while the rest trains: here they take 35 s, and that 30 s."""
    stop = find_stop(growing(running(), moving_s=105.0))
    assert stop.mode is StopMode.HOLD_WITHIN_STEP
    assert stop.reason.endswith("; within its step (60 s are left): that saves 30 s and costs 5.0 s")


@pytest.mark.parametrize(
    "view",
    [
        growing(running(stepped_at=NOW - 95.0)),
        growing(running(mean_step_s=5.0, stepped_at=NOW - 1.0)),
        growing(running(), moving_s=181.0),
        growing(running(), has_fixed_stages=True),
        growing(running(last_step=None, in_place=True, resumed_step=None)),
        growing(running(last_step=None, in_place=True, resumed_step=5, stepped_at=NOW - 5.0)),
    ],
    ids=["soon over", "short", "dear", "its script cannot", "not begun", "only just begun"],
)
def test_it_finishes_a_step_of_which_little_can_be_gained(view: JobView) -> None:
    assert find_stop(view).mode is StopMode.HOLD_FIRST


def test_it_finishes_a_step_whose_sums_would_be_lost() -> None:
    """On a device that the next shape does not use, or with micro-batches that do not fit into its own."""
    two = generation(worker(0, "a"), worker(1, "b"), mean_step_s=STEP_S, stepped_at=NOW - 40.0, in_place=True)
    elsewhere = replace(proposal(HERE, 32.0), placement=devices("a", "c"))
    view = job(two, devices=devices("a", "b", "c"), proposal=elsewhere)
    (stop,) = decide_when_prepared(view, vm("a"), vm("b"), vm("c")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.HOLD_FIRST
    for before, after, mode in [(3, 2, StopMode.HOLD_FIRST), (4, 2, StopMode.HOLD_WITHIN_STEP)]:
        view = growing(running(plan=replace(plan_for(1), micro_batch=before)))
        assert view.proposal is not None
        plan = replace(plan_for(2, 16.0), micro_batch=after)
        assert find_stop(replace(view, proposal=replace(view.proposal, plan=plan))).mode is mode


def test_it_finishes_a_step_where_no_process_waits_for_it() -> None:
    """What new processes take after a stop are states, and no sums."""
    view = growing(running(), starts_ahead=False)
    (stop,) = decide(view, vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.mode is StopMode.HOLD_FIRST


def test_the_rest_of_a_first_step_in_place_is_what_was_left_of_it() -> None:
    plan = plan_for(1)
    count = count_micro_batches(plan.global_batch, plan.micro_batch)
    first = running(last_step=None, in_place=True, resumed_step=5, micro_batches_left=count // 2)
    assert predict_rest_s(NOW, first) == pytest.approx(STEP_S * (count // 2) / count - 40.0)
    assert find_stop(growing(replace(first, micro_batches_left=count))).mode is StopMode.HOLD_WITHIN_STEP


@pytest.mark.parametrize("mode", [StopMode.HOLD_FIRST, StopMode.HOLD_WITHIN_STEP])
def test_processes_that_left_within_their_first_step_take_the_next_shape_in_place(mode: StopMode) -> None:
    """Without such a stop, a generation in place that has made no step is not followed by another one."""
    ended = generation(
        worker(0, "a", ExitCause.GENERATION_ENDED, held_step=5),
        state=GenerationState.ENDED,
        stop=StopView(mode=mode, cause=EndCause.GROWTH, reason="growth", requested_at=NOW - 2),
        end_cause=EndCause.GROWTH,
        ended_at=NOW - 1,
        last_step=None,
        in_place=True,
        resumed_step=5,
    )
    proposed = proposal(HERE)
    assert proposed.plan is not None
    wanted = WantedNewcomers(number=3, plan=proposed.plan, placement=HERE, devices=frozenset(HERE[1:]))
    newcomers = NewcomersView(wanted=wanted, since=NOW - 9, at_door=frozenset(HERE[1:]))
    view = job(ended, devices=HERE, proposal=proposed, newcomers=newcomers, survivors=frozenset(HERE[:1]))
    (start,) = decide(view, vm("a"), vm("b")).actions
    assert isinstance(start, StartGeneration)
    assert start.in_place is (mode is StopMode.HOLD_WITHIN_STEP)
