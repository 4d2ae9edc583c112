"""How many VMs to ask for and to give up: limits, refusals, and the jobs' wants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, RULES, vm
from varuna_manager.domain.fleet_decision import (
    FleetLimits,
    FleetView,
    JobDemand,
    Refusal,
    RefusalKind,
    RefusalStreak,
    VmRange,
    backoff_s,
    count_wanted_vms,
    decide_fleet,
)
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState

FLEET = FleetView(target=5, vms=(vm("a"), vm("b")))


def test_no_more_are_asked_for_than_the_limit_allows_and_the_reason_says_so() -> None:
    # A VM that is draining or lost is paid for too.
    view = replace(FLEET, vms=(*FLEET.vms, vm("c", state=VmState.LOST)), limits=FleetLimits(max_vms=4))
    decision = decide_fleet(NOW, view, RULES)
    assert decision.create == 1
    assert decision.reason == "5 VMs are wanted and 2 are there; the limit is 4 VMs"


@pytest.mark.parametrize(
    ("deadline", "workers", "deleted"),
    [
        (None, 0, True),
        (None, 1, False),
        (NOW - RULES.notice_overdue_s + 1, 0, False),
        (NOW - RULES.notice_overdue_s, 0, True),
        (NOW - RULES.notice_overdue_s, 1, False),
    ],
    ids=["asked-to-leave", "still-busy", "due-a-moment-ago", "notice-withdrawn", "withdrawn-and-busy"],
)
def test_a_vm_that_has_left_its_jobs_is_given_back(deadline: float | None, workers: int, deleted: bool) -> None:
    leaving = vm("c", state=VmState.DRAINING, notice_deadline=deadline, workers=workers)
    view = replace(FLEET, target=2, vms=(*FLEET.vms, leaving))
    assert decide_fleet(NOW, view, RULES).delete == (("c",) if deleted else ())


@pytest.mark.parametrize(
    ("age_s", "silent_s", "deleted"),
    [(60.0, 7200.0, False), (7200.0, 1.0, False), (7200.0, None, False), (120, 120, True)],
)
def test_a_vm_whose_agent_never_connects_is_given_back_once_this_manager_has_waited_for_it_too(
    age_s: float, silent_s: float | None, deleted: bool
) -> None:
    coming = vm(
        "c", state=VmState.REQUESTED, connected=False, connected_since_start=False, age_s=age_s, silent_s=silent_s
    )
    view = replace(FLEET, target=3, vms=(*FLEET.vms, coming))
    assert decide_fleet(NOW, view, RULES).delete == (("c",) if deleted else ())


def test_no_more_are_asked_for_than_may_be_spent() -> None:
    view = replace(FLEET, limits=FleetLimits(max_cost_per_hour=10.0), prices={"a": 3.0, "b": 2.5}, price_per_hour=2.0)
    decision = decide_fleet(NOW, view, RULES)
    assert decision.create == 2
    assert "they cost 5.5 an hour and one more costs 2, but the limit is 10" in decision.reason


@pytest.mark.parametrize(
    ("kind", "first_s", "most_s"),
    [
        (RefusalKind.CAPACITY, 1, 30),
        (RefusalKind.QUOTA, 30, 600),
        (RefusalKind.THROTTLED, 5, 120),
        (RefusalKind.FAILED, 2, 60),
    ],
)
def test_the_pause_depends_on_the_kind_of_refusal(kind: RefusalKind, first_s: float, most_s: float) -> None:
    assert [backoff_s(count, kind) for count in (1, 2, 1000)] == [first_s, 2 * first_s, most_s]


@given(
    st.sampled_from(RefusalKind), st.integers(1, 50), st.none() | st.floats(0, 1000), st.floats(0, 1, exclude_max=True)
)
def test_nobody_is_asked_before_the_pause_is_over_nor_before_the_provider_wants(
    kind: RefusalKind, count: int, retry_after_s: float | None, jitter: float
) -> None:
    last = Refusal(kind=kind, reason="no", retry_after_s=retry_after_s)
    refusals = RefusalStreak(count=count, last=last, last_at=NOW, jitter=jitter)
    assert max(backoff_s(count, kind) / 2, retry_after_s or 0) <= refusals.pause_s
    assert refusals.pause_s <= max(backoff_s(count, kind), retry_after_s or 0)
    view = replace(FLEET, refusals=refusals)
    assert decide_fleet(NOW + 0.99 * refusals.pause_s, view, RULES).create == 0
    assert decide_fleet(NOW + refusals.pause_s + 1e-6, view, RULES).create == 3


def test_a_fleet_that_follows_the_jobs_gives_up_only_what_has_been_idle_for_long() -> None:
    vms = (vm("busy", workers=1), vm("idle"), vm("just idle"), vm("idle too"))
    idle_s = {"idle": 400.0, "just idle": 3.0, "idle too": 300.0}
    view = FleetView(target=1, vms=vms, why="1 job can use 1 GPU", idle_s=idle_s, spare_after_s=300.0)
    decision = decide_fleet(NOW, view, RULES)
    assert set(decision.drain) == {"idle", "idle too"}
    assert ": 1 cannot go yet (silent, in use, or used a moment ago)" in decision.reason


def test_as_many_vms_as_the_jobs_can_use_within_the_range() -> None:
    bounds = VmRange(min_vms=1, max_vms=10)
    small, any_number = JobDemand(id="s", max_gpus=9), JobDemand(id="a", max_gpus=None)
    assert count_wanted_vms(bounds, [], gpus_per_vm=4)[0] == 1
    assert count_wanted_vms(bounds, [small], gpus_per_vm=4)[0] == 3
    assert count_wanted_vms(bounds, [small] * 9, gpus_per_vm=4)[0] == 10
    assert count_wanted_vms(bounds, [small, any_number], gpus_per_vm=4)[0] == 10
    assert count_wanted_vms(bounds, [any_number], gpus_per_vm=4, enough_vms=6) == (
        6,
        "1 job left further ones idle, within 1 to 10 VMs",
    )


@given(
    st.integers(0, 20),
    st.lists(st.builds(vm, st.uuids().map(str), state=st.sampled_from(VmState), workers=st.integers(0, 2))),
    st.none() | st.integers(0, 20),
)
def test_a_decision_never_asks_and_gives_up_at_once_nor_goes_beyond_the_limit(
    target: int, vms: list[VmView], most: int | None
) -> None:
    view = FleetView(target=target, vms=tuple(vms), limits=FleetLimits(max_vms=most))
    decision = decide_fleet(NOW, view, RULES)
    assert not (decision.create and decision.drain)
    assert decision.create <= target
    assert most is None or not decision.create or len(vms) + decision.create <= most
    assert set(decision.drain).isdisjoint(decision.delete)
