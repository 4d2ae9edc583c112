"""How often a generation should need its checkpoint."""

from __future__ import annotations

import pytest

from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.store_stops import expect_store_stops
from varuna_planner.liveput.hazard import PRIOR_BURSTS

FLEET = FleetPast(removals=10.0, vm_hours=90.0, losses_at=(0.0, 100.0, 200.0))
"""0.11 removals per VM-hour, each VM alone."""
LOST = sum(PRIOR_BURSTS) + 3


@pytest.mark.parametrize(
    ("vm_ids", "p", "keepers", "chance"),
    [
        ("ab", 2, (), (5 * 0.5 * 2 + 1) / LOST),
        ("ab", 2, (1, 0), 1 / LOST),
        ("abc", 3, (1, 2, 0), 1 / LOST),
        ("abcd", 2, (), 2 / 6 / LOST),
        ("aabb", 2, (), 1 / LOST),
        ("abab", 2, (), (5 * 0.5 * 2 + 1) / LOST),
        ("abcdef", 2, (), 0.0),
    ],
)
def test_stops_need_the_checkpoint_where_all_vms_of_a_stage_are_lost_together(
    vm_ids: str, p: int, keepers: tuple[int, ...], chance: float
) -> None:
    stops = FLEET.stops_per_hour(len(set(vm_ids)))
    expected = expect_store_stops(FLEET, vm_ids, p, keepers=keepers, holds_state=True)
    assert expected == pytest.approx(stops * chance)


def test_each_stop_needs_it_where_processes_hold_nothing() -> None:
    assert expect_store_stops(FLEET, "abcd", 2, keepers=(), holds_state=False) == FLEET.stops_per_hour(4)


@pytest.mark.parametrize(
    ("fleet", "text"),
    [
        (
            FleetPast(vm_hours=0.136),
            "no VM was lost in 0.14 VM-hours so far; the estimate starts from 1 in 10 VM-hours",
        ),
        (
            FleetPast(vm_hours=2.0, removals=0.9, market_hazard=0.078),
            "newer losses count more: about 1 VM was lost in 2 VM-hours so far; "
            "the estimate starts from the provider's 0.078 per VM-hour",
        ),
        (FLEET, "newer losses count more: about 10 VMs were lost in 90 VM-hours"),
        (FleetPast(vm_hours=400.0), "no VM was lost in 400 VM-hours"),
    ],
)
def test_what_was_seen_of_losses_is_said_with_what_is_assumed(fleet: FleetPast, text: str) -> None:
    assert fleet.describe_losses() == text
