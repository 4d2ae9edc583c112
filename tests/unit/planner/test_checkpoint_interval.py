"""The bounds within which saves come as often as pays. `test_liveput` has what pays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_planner.liveput.checkpoint_interval import Cadence


@pytest.mark.parametrize(
    "wrong", [{"stall_share": 0.0}, {"write_share": 1.5}, {"min_interval_s": -1.0}, {"pinned_interval_s": 0.0}]
)
def test_a_cadence_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Cadence(**wrong)


@pytest.mark.parametrize(("copied", "uncopied", "expected"), [(0.1, 3.0, 3.0), (0.1, 0.0, 0.1), (0.0, 0.0, 0.0)])
def test_losses_need_the_checkpoint_as_long_as_no_copy_is_whole(
    copied: float, uncopied: float, expected: float
) -> None:
    """A manager of an earlier version says nothing of it: 0."""
    cadence = Cadence(stops_per_hour=copied, uncopied_stops_per_hour=uncopied)
    assert cadence.stops_per_hour == copied
    assert cadence.without_copies().stops_per_hour == expected


def test_a_hazard_that_pays_for_more_saves_gets_them_within_what_they_may_cost() -> None:
    usual_s = Cadence().interval_s(0.5, 1.0, 2.0)
    often_s = Cadence(stops_per_hour=15.0).interval_s(0.5, 1.0, 2.0)
    assert usual_s == 50.0
    assert 0.5 / 0.05 <= often_s < usual_s
    # Young's sqrt(2 · stall · time between stops), whole mini-batches apart.
    assert often_s == pytest.approx((2 * 0.5 * 240) ** 0.5, rel=0.2)
    assert Cadence(stops_per_hour=10_000.0).interval_s(0.5, 1.0, 0.1) == 0.5 / 0.05, "however often VMs go"


@settings(deadline=None)
@given(
    st.floats(min_value=0, max_value=1e4),
    st.floats(min_value=0, max_value=5),
    st.floats(min_value=0, max_value=60),
    st.floats(min_value=1e-3, max_value=300),
)
def test_a_hazard_never_makes_saves_rarer_nor_writes_longer_than_allowed(
    stops_per_hour: float, stall_s: float, write_s: float, minibatch_s: float
) -> None:
    usual_s = Cadence().interval_s(stall_s, write_s, minibatch_s)
    interval_s = Cadence(stops_per_hour=stops_per_hour).interval_s(stall_s, write_s, minibatch_s)
    assert max(1.0, stall_s / 0.05, write_s / 0.25) <= interval_s <= usual_s
