from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.fleet_watch import FleetWatch
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState
from varuna_planner.liveput.hazard import PRIOR_REMOVALS, PRIOR_VM_HOURS, removals_per_vm_hour

HOUR_S = 3600.0


def test_a_fleet_of_which_nothing_was_seen_has_the_priors_hazard() -> None:
    assert removals_per_vm_hour(0, 0) == PRIOR_REMOVALS / PRIOR_VM_HOURS
    assert FleetPast().stops_per_hour(4) == pytest.approx(0.4)


@settings(deadline=None)
@given(st.floats(min_value=0.01, max_value=10))
def test_what_was_seen_long_enough_outweighs_the_prior(rate: float) -> None:
    vm_hours = 10_000 / min(rate, 1)
    assert removals_per_vm_hour(rate * vm_hours, vm_hours) == pytest.approx(rate, rel=0.02)


def test_hours_without_a_loss_lower_it() -> None:
    assert removals_per_vm_hour(0, 90) == pytest.approx(0.01)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 removals"):
        removals_per_vm_hour(-1, 0)
    with pytest.raises(ValueError, match=r"-0\.1 removals per VM-hour are expected"):
        removals_per_vm_hour(0, 0, -0.1)


def test_what_the_market_tells_stands_where_nothing_was_seen_and_gives_way_to_what_is() -> None:
    assert removals_per_vm_hour(0, 0, 0.025) == pytest.approx(0.025)
    assert removals_per_vm_hour(10, 10, 0.0) == pytest.approx(0.5)
    rates = FleetWatch(0.0).observe_vms({}, 0.0, 0.025)
    assert rates.stops_per_hour(4) == pytest.approx(0.1)


def vm(number: int, state: VmState = VmState.READY, notice_deadline: float | None = None) -> VmView:
    return VmView(id=f"vm{number}", state=state, gpus=1, notice_deadline=notice_deadline)


def test_the_manager_counts_its_fleets_hours_and_losses() -> None:
    watch = FleetWatch(0.0)
    four = {view.id: view for view in map(vm, range(4))}
    watch.observe_vms(four, 0.0)
    lost, drained = vm(0, VmState.LOST), vm(1, VmState.DRAINING)
    announced = vm(2, VmState.DRAINING, notice_deadline=HOUR_S + 30)
    past = watch.observe_vms({**four, lost.id: lost, drained.id: drained, announced.id: announced}, HOUR_S)
    assert past.vm_hours == pytest.approx(4)
    assert past.removals == pytest.approx(2), "one that a user drains is not lost"
    later = watch.observe_vms({vm(3).id: vm(3)}, 25 * HOUR_S)
    assert later.removals == pytest.approx(1), "they count half after a day"
    assert later.vm_hours == pytest.approx(2 + 24)
