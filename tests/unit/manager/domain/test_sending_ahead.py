"""Whether the state goes to the next shape before the present generation leaves for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decision_views import NOW, RULES, at_door, decide, devices, generation, job, plan_for, proposal, vm, worker
from varuna_manager.domain.actions import Decision, StopGeneration
from varuna_manager.domain.newcomers import NewcomersView, WantedNewcomers
from varuna_manager.domain.observed import GenerationView, JobView
from varuna_manager.domain.states import StopMode
from varuna_planner.liveput.morph_cost import MovingTime, StateMoves

HERE = devices("a", "b")
STEP_S = 100.0
COMMITTED = 7
MOVING_S = 6.0


def running(**changes: Any) -> GenerationView:
    """Of one worker, 40 s into a step of 100 s."""
    return generation(
        worker(0, "a"), **{"mean_step_s": STEP_S, "stepped_at": NOW - 40.0, "last_step": COMMITTED, **changes}
    )


def move_in(seconds: float) -> StateMoves:
    """New processes would take twice as long."""
    return StateMoves(2 * seconds, MovingTime(seconds))


def growing(view: GenerationView | None = None, *, rate: float = 10.0, moving_s: float = MOVING_S) -> JobView:
    """It has 8 examples/s now."""
    return job(view or running(), devices=HERE, proposal=replace(proposal(HERE, rate), moves=move_in(moving_s)))


def ask(view: JobView, newcomers: NewcomersView | None = None) -> Decision:
    return decide(replace(view, newcomers=newcomers), vm("a"), vm("b"), vm("c"))


def prepare(view: JobView, **changes: Any) -> NewcomersView:
    """The newcomers that it wants, at the door."""
    wanted = ask(view).newcomers
    assert wanted is not None
    return at_door(wanted, **changes)


def send(view: JobView, *, since: float = NOW - 10.0, steps: dict[int, int] | None = None) -> NewcomersView:
    """As `prepare`, when the state is on its way. `steps`: what has been sent, by rank."""
    newcomers = prepare(view)
    decision = ask(view, newcomers)
    assert decision.newcomers is not None
    return replace(newcomers, wanted=decision.newcomers, sending_since=since, sent_steps=steps or {})


def find_stop(decision: Decision) -> StopGeneration:
    (stop,) = decision.actions
    assert isinstance(stop, StopGeneration)
    return stop


def test_it_trains_on_until_the_state_is_there_and_leaves_in_the_middle_of_its_step() -> None:
    view = growing()
    newcomers = prepare(view)
    decision = ask(view, newcomers)
    assert decision.actions == ()
    assert decision.newcomers is not None
    assert decision.newcomers.sends_state
    assert decision.newcomers.request == newcomers.wanted.request, "the processes that are there stay"
    assert decision.reason.startswith("generation 2 sends its state to the VMs of the next one: growth: 2 GPUs")
    assert ask(view, send(view)).actions == ()
    stop = find_stop(ask(view, send(view, steps={0: COMMITTED})))
    assert stop.mode is StopMode.HOLD_WITHIN_STEP
    assert stop.reason.endswith(
        "; within its step (60 s are left, the state is there): that saves 18 s and costs 0.0 s"
    )


@pytest.mark.parametrize(
    "view",
    [
        growing(moving_s=0.5),
        growing(moving_s=31.0),
        growing(running(mean_step_s=20.0, stepped_at=NOW - 5.0)),
        growing(rate=16.0),
    ],
    ids=["little to move", "longer than a step", "short steps", "the wait costs more than it gains"],
)
def test_it_leaves_at_once_where_sending_ahead_is_not_worth_it(view: JobView) -> None:
    assert find_stop(ask(view, prepare(view))).mode in (StopMode.HOLD_FIRST, StopMode.HOLD_WITHIN_STEP)


@pytest.mark.parametrize(("late_s", "sends"), [(4.5, True), (5.5, False)])
def test_what_comes_while_the_step_runs_is_not_worth_sending_ahead(late_s: float, sends: bool) -> None:
    """Of 6 s in which the state moves to other stages, a second or more is worth it."""
    view = growing()
    assert view.proposal is not None
    plan = replace(plan_for(1, 8.5), p=2, predicted_minibatch_s=80.0)
    moves = StateMoves(12.0, MovingTime(MOVING_S, late_s))
    view = replace(view, proposal=replace(view.proposal, plan=plan, moves=moves))
    decision = ask(view, prepare(view))
    assert (decision.newcomers is not None and decision.newcomers.sends_state) == sends


def test_it_leaves_at_once_where_what_it_has_of_the_step_would_not_count() -> None:
    view = growing(running(plan=replace(plan_for(1), micro_batch=3)))
    assert view.proposal is not None
    plan = replace(plan_for(2, 10.0), micro_batch=2)
    view = replace(view, proposal=replace(view.proposal, plan=plan))
    assert find_stop(ask(view, prepare(view))).mode is StopMode.HOLD_FIRST


def test_what_was_sent_of_an_older_step_does_not_count() -> None:
    """Nor of a step that not all are in, nor for another shape."""
    view = growing()
    assert ask(view, send(view, steps={0: COMMITTED - 1})).actions == ()
    two = growing(replace(running(), workers=(worker(0, "a"), worker(1, "b"))))
    there = devices("a", "b", "c")
    two = replace(two, devices=there, proposal=replace(proposal(there, 10.0), moves=move_in(6.0)))
    sent = send(two, steps={0: COMMITTED, 1: COMMITTED + 1})
    assert ask(two, sent).actions == ()
    assert find_stop(ask(two, replace(sent, sent_steps={0: COMMITTED + 1, 1: COMMITTED + 1})))
    other = WantedNewcomers(number=3, plan=plan_for(2), placement=HERE[::-1], devices=frozenset(HERE[1:]))
    assert ask(view, replace(send(view, steps={0: COMMITTED}), wanted=other)).newcomers is not None


def test_it_does_not_wait_for_ever() -> None:
    view = growing(running(stepped_at=NOW - 45.0))
    assert ask(view, send(view, since=NOW - 37.0)).actions == ()
    stop = find_stop(ask(view, send(view, since=NOW - 39.0)))
    assert stop.mode is StopMode.HOLD_WITHIN_STEP
    assert "the state is there" not in stop.reason


def test_a_step_that_is_nearly_over_is_finished_and_the_next_ones_state_sent() -> None:
    view = growing(running(stepped_at=NOW - 95.0))
    assert ask(view, send(view, since=NOW - 30.0, steps={0: COMMITTED})).actions == ()
    stepped = growing(running(stepped_at=NOW - 2.0, last_step=COMMITTED + 1))
    assert ask(stepped, send(stepped, since=NOW - 60.0, steps={0: COMMITTED})).actions == ()
    assert find_stop(ask(stepped, send(stepped, since=NOW - 310.0, steps={0: COMMITTED})))


def test_plans_that_change_again_and_again_do_not_keep_it_from_leaving() -> None:
    view = growing()
    newcomers = prepare(view, since=NOW - RULES.newcomers_wait_s - 1.0)
    assert find_stop(ask(view, newcomers))
    assert ask(view, replace(newcomers, since=NOW - RULES.newcomers_wait_s + 1.0)).actions == ()
