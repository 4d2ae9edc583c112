"""Whether a planned morph waits for the processes that are started ahead for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from decision_views import NOW, RULES, at_door, decide, devices, generation, job, kinds, plan_for, proposal, vm, worker
from varuna_manager.domain.actions import QuarantineVms, StopGeneration
from varuna_manager.domain.newcomers import NewcomersView, WantedNewcomers, judge_newcomers
from varuna_manager.domain.observed import JobView
from varuna_manager.domain.states import EndCause, ExitCause, JobState, StopMode

HERE = devices("a", "b")
WANTED = WantedNewcomers(number=3, plan=plan_for(2), placement=HERE, devices=frozenset(HERE))
WAIT_S = RULES.newcomers_wait_s


def growing(**changes: object) -> JobView:
    """Of generation 2 on VM a, which is to grow into b."""
    return job(generation(worker(0, "a")), devices=HERE, proposal=proposal(HERE), **changes)


@pytest.mark.parametrize("has_fixed_stages", [False, True])
def test_growth_waits_for_processes_that_are_started_ahead(has_fixed_stages: bool) -> None:
    """Beside the present one, or in its place."""
    grows = partial(growing, has_fixed_stages=has_fixed_stages)
    first = decide(grows(), vm("a"), vm("b"))
    assert not first.actions
    assert first.newcomers is not None
    assert (first.newcomers.number, first.newcomers.placement) == (3, HERE)
    assert first.newcomers.devices == frozenset(HERE if has_fixed_stages else HERE[1:])
    assert first.claims == frozenset(HERE)
    assert "under way while the processes of the next one start: growth: 2 GPUs instead of 1" in first.reason
    some = at_door(first.newcomers, at_door=frozenset(HERE[:1]))
    again = decide(grows(newcomers=some), vm("a"), vm("b"))
    assert (again.reason, again.newcomers, again.actions) == (first.reason, first.newcomers, ())
    (stop,) = decide(grows(newcomers=at_door(first.newcomers)), vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert (stop.mode, stop.cause) == (StopMode.HOLD_FIRST, EndCause.GROWTH)
    assert "start after the stop" not in stop.reason


def test_a_slow_vm_is_left_and_quarantined_when_the_processes_are_there() -> None:
    slow = replace(vm("b"), slow_ratio=2.0, slow_reason="it is slow")
    moves = job(generation(worker(0, "a"), worker(1, "b")), devices=HERE, proposal=proposal(devices("a"), 12.0))
    assert StopGeneration in kinds(decide(moves, vm("a"), slow)), "the process on the other VM goes on"
    view = replace(moves, has_fixed_stages=True)
    first = decide(view, vm("a"), slow)
    assert not first.actions
    assert first.newcomers is not None
    prepared = decide(replace(view, newcomers=at_door(first.newcomers)), vm("a"), slow)
    assert kinds(prepared) == [QuarantineVms, StopGeneration]


def test_one_that_never_comes_is_said_in_one_line_and_not_waited_for() -> None:
    wanted = decide(growing(), vm("a"), vm("b")).newcomers
    assert wanted is not None
    late = at_door(wanted, since=NOW - WAIT_S, at_door=frozenset())
    (stop,) = decide(growing(newcomers=late), vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert stop.reason.endswith(
        "; its processes start after the stop: 1 of 1 processes had not reached Varuna() after 120 s (first: on VM b)"
    )


@pytest.mark.parametrize("known", [True, False])
def test_a_fault_ends_the_wait_at_once(known: bool) -> None:
    """Of a newcomer now, or one that the manager remembers."""
    wanted = decide(growing(), vm("a"), vm("b")).newcomers
    assert wanted is not None
    broken = NewcomersView(wanted=wanted, since=NOW, faults={HERE[1]: "KeyError: 'x'"})
    view = growing(newcomers_obstacle="KeyError: 'x'") if known else growing(newcomers=broken)
    (stop,) = decide(view, vm("a"), vm("b")).actions
    assert isinstance(stop, StopGeneration)
    assert "start after the stop: " in stop.reason
    assert stop.reason.endswith("KeyError: 'x'")
    assert "\n" not in stop.reason


def test_nothing_is_started_ahead_where_the_rule_forbids_it() -> None:
    assert judge_newcomers(NOW, WANTED, None, "", 0.0) == (False, "")


def test_what_waits_for_another_placement_is_not_enough() -> None:
    other = replace(WANTED, placement=devices("a", "c"))
    assert judge_newcomers(NOW, WANTED, at_door(other), "", WAIT_S).is_awaited
    assert not judge_newcomers(NOW, WANTED, at_door(WANTED), "", WAIT_S).is_awaited
    is_awaited, why = judge_newcomers(NOW, WANTED, at_door(other, since=NOW - WAIT_S), "", WAIT_S)
    assert not is_awaited, "plans that change all the time do not keep a job from growing"
    assert why


def test_a_request_is_the_same_as_long_as_the_generation_would_be() -> None:
    faster = replace(WANTED, plan=replace(WANTED.plan, examples_per_s=1e3, predicted_minibatch_s=9.0))
    assert faster.request == WANTED.request
    others = [
        replace(WANTED, number=4),
        replace(WANTED, placement=HERE[::-1]),
        replace(WANTED, plan=replace(WANTED.plan, micro_batch=WANTED.plan.micro_batch + 1)),
    ]
    assert len({WANTED.request, *(other.request for other in others)}) == 4


def test_a_loss_and_the_end_of_a_job_do_not_wait_for_newcomers() -> None:
    half = at_door(WANTED, at_door=frozenset())
    lost = job(generation(worker(0, "a", ExitCause.KILLED)), devices=HERE, proposal=proposal(HERE), newcomers=half)
    assert kinds(decide(lost, vm("a"), vm("b"))) != []
    cancelled = growing(newcomers=half, state=JobState.CANCELLING)
    assert kinds(decide(cancelled, vm("a"), vm("b"))) == [StopGeneration]
