"""The fleet: states of VMs, and how many are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, RULES, vm
from varuna_manager.domain import states
from varuna_manager.domain.fleet_decision import (
    FleetView,
    Refusal,
    RefusalKind,
    RefusalStreak,
    backoff_s,
    decide_fleet,
    decide_vm,
)
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import (
    VmState,
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (vm("a", state=VmState.REQUESTED, connected=False), None),
        (vm("a", state=VmState.REQUESTED), VmState.READY),
        (vm("a", silent_s=5.0), VmState.SUSPECT),
        (vm("a", silent_s=10.0), VmState.LOST),
        (vm("a", silent_s=10.0, connected_since_start=False), None),
        (vm("a", state=VmState.SUSPECT, silent_s=0.1), VmState.READY),
        (vm("a", state=VmState.LOST, silent_s=0.1), VmState.READY),
        (vm("a", state=VmState.LOST, silent_s=7.0), None),
        (vm("a", listed=False), VmState.GONE),
        (vm("a", listed=None), None),
        (vm("a", notice_deadline=NOW + 30), VmState.DRAINING),
        (vm("a", state=VmState.DRAINING, notice_deadline=NOW + 30), None),
        (vm("a", state=VmState.DRAINING, silent_s=11.0), VmState.LOST),
    ],
)
def test_a_vms_state_follows_what_is_heard_of_it(before: VmView, after: VmState | None) -> None:
    verdict = decide_vm(NOW, before, RULES)
    assert (verdict.state if verdict is not None else None) == after
    if verdict is not None:
        assert verdict.state in states.VM_TRANSITIONS[before.state]


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (vm("a", listed=False), "the provider no longer lists it (there was no notice)"),
        (vm("a", listed=False, end_reason="OOMKilled"), "OOMKilled"),
        (vm("a", state=VmState.REQUESTED, connected=False, listed=False, end_reason="no node"), "no node"),
        (vm("a", state=VmState.DRAINING, listed=False, end_reason="its agent ended", reason="idle"), "it left: idle"),
    ],
)
def test_a_vm_that_is_gone_has_the_providers_reason_unless_it_was_to_leave(before: VmView, reason: str) -> None:
    verdict = decide_vm(NOW, before, RULES)
    assert verdict is not None
    assert verdict.reason == reason


@given(
    st.builds(
        VmView,
        id=st.just("a"),
        state=st.sampled_from([state for state in VmState if state is not VmState.GONE]),
        connected=st.booleans(),
        connected_since_start=st.booleans(),
        silent_since=st.none() | st.floats(900, 1000),
        listed=st.sampled_from([True, False, None]),
        notice_deadline=st.none() | st.floats(900, 1100),
    )
)
def test_a_vms_verdict_is_always_a_legal_transition(view: VmView) -> None:
    verdict = decide_vm(NOW, view, RULES)
    assert verdict is None or verdict.state in states.VM_TRANSITIONS[view.state]


def test_the_fleet_asks_for_what_is_missing_and_backs_off_when_refused() -> None:
    fleet = FleetView(target=3, vms=(vm("a"), vm("b", state=VmState.LOST)))
    assert decide_fleet(NOW, fleet, RULES).create == 2
    last = Refusal(kind=RefusalKind.CAPACITY, reason="no capacity")
    refused = replace(fleet, refusals=RefusalStreak(count=2, last=last, last_at=NOW - 1))
    assert decide_fleet(NOW, refused, RULES).create == 0
    assert "no capacity" in decide_fleet(NOW, refused, RULES).reason
    assert decide_fleet(NOW + backoff_s(2), refused, RULES).create == 2


def test_a_smaller_target_drains_the_idle_first_and_gives_back_the_empty() -> None:
    fleet = FleetView(target=1, vms=(vm("a", workers=1), vm("b"), vm("c", workers=1, age_s=9.0)))
    assert decide_fleet(NOW, fleet, RULES).drain == ("b", "a")
    drained = vm("b", state=VmState.DRAINING)
    busy = vm("a", state=VmState.DRAINING, workers=1)
    assert decide_fleet(NOW, FleetView(target=0, vms=(drained, busy)), RULES).delete == ("b",)


def test_nothing_new_starts_on_a_cordoned_vm_and_another_takes_its_place() -> None:
    cordoned = vm("a", cordoned=True)
    assert not cordoned.usable
    fleet = FleetView(target=2, vms=(cordoned, vm("b")))
    assert decide_fleet(NOW, fleet, RULES).create == 1
    enough = FleetView(target=1, vms=(cordoned, vm("b")))
    assert decide_fleet(NOW, enough, RULES) == replace(decide_fleet(NOW, enough, RULES), create=0, drain=(), delete=())
