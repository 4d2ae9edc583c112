from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.fleet_watch import FleetWatch
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState
from varuna_planner.liveput.hazard import (
    BURST_S,
    PRIOR_BURSTS,
    PRIOR_REMOVALS,
    PRIOR_VM_HOURS,
    holder_losses_per_hour,
    list_bursts,
    removals_per_vm_hour,
)

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


def test_losses_that_follow_each_other_are_one_burst() -> None:
    assert list_bursts([]) == ()
    assert list_bursts([0.0]) == (1,)
    assert list_bursts([0.0, 1.0, BURST_S + 1.0, 500.0, 2000.0, 2000.0]) == (3, 1, 2)


@pytest.mark.parametrize(("holders", "vms"), [([1, 1], 2), ([1] * 8, 8), ([1], 1)])
def test_a_job_whose_stages_one_vm_has_needs_its_checkpoint_at_each_loss(holders: list[int], vms: int) -> None:
    assert holder_losses_per_hour(3.0, (1,) * 10_000, holders, vms) == pytest.approx(3.0, rel=1e-3)


def test_single_losses_take_no_stage_that_two_vms_have() -> None:
    seen = (1,) * 96
    # Of 100 VMs lost, only the prior's two went together, in one of C(6, 2) pairs. 3 of these have all of a stage.
    assert holder_losses_per_hour(2.0, seen, [2, 2, 2], 6) == pytest.approx(2.0 * 3 / 15 / 100)
    assert holder_losses_per_hour(2.0, seen, [3, 3], 6) == 0.0


def test_bursts_are_counted_as_often_as_they_take_all_holders() -> None:
    """Played by chance."""
    chance, vms, d, p = random.Random(7), 12, 3, 4
    sizes = (1, 2, 3, 5, 8)
    weights = [chance.choice(sizes) for _ in range(400)]
    expected = holder_losses_per_hour(1.0, weights, [d] * p, vms)
    lost = needed = 0
    for _ in range(100):
        for size in (*weights, *PRIOR_BURSTS):
            gone = set(chance.sample(range(vms), size))
            lost += size
            needed += sum({stage + replica * p for replica in range(d)} <= gone for stage in range(p))
    assert expected == pytest.approx(needed / lost, rel=0.05)


@given(
    stops=st.floats(0.0, 100.0),
    bursts=st.lists(st.integers(1, 30), max_size=20),
    p=st.integers(1, 8),
    d=st.integers(1, 4),
    copies=st.integers(0, 1),
)
def test_no_more_stops_need_the_checkpoint_than_there_are(
    stops: float, bursts: list[int], p: int, d: int, copies: int
) -> None:
    vms = p * d
    held = [min(d + copies, vms)] * p
    some = holder_losses_per_hour(stops, bursts, held, vms)
    assert 0.0 <= some <= stops * (1 + 1e-9)
    assert holder_losses_per_hour(stops, bursts, [min(one + 1, vms) for one in held], vms) <= some * (1 + 1e-9)
