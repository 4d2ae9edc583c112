"""How long finished records are kept, how many are deleted at once, and what is kept of VMs for each day."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_manager.domain.retention import DAY_S, GoneVm, choose_batch_size, find_horizon, sum_up_by_day
from varuna_manager.settings import ManagerSettings


def test_zero_days_keep_for_ever() -> None:
    assert find_horizon(100 * DAY_S, 0) is None
    assert find_horizon(100 * DAY_S, 30) == 70 * DAY_S


def test_the_settings_reach_the_rules() -> None:
    keep = ManagerSettings(keep_events_days=1, keep_jobs_days=2, keep_vms_days=3, keep_archives_days=4).make_keep_days()
    assert (keep.events, keep.jobs, keep.vms, keep.archives, keep.logs, keep.tokens) == (1, 2, 3, 4, 7, 7)
    with pytest.raises(ValueError, match="keep_jobs_days"):
        ManagerSettings(keep_jobs_days=-1)


def test_a_batch_that_held_the_writer_for_long_is_followed_by_a_smaller_one() -> None:
    assert choose_batch_size(1000, 0.5) == 100
    assert choose_batch_size(1000, 0.025) == 2000
    assert choose_batch_size(1000, 1e-9) == 2000
    assert choose_batch_size(100, 60.0) == 100, "it never stands still"
    assert choose_batch_size(5000, 0.001) == 5000


times = st.floats(0, 40 * DAY_S)
vms = st.builds(
    lambda created_at, life_s, gpus, price: GoneVm(
        created_at=created_at, gone_at=created_at + life_s, gpus=gpus, price_per_hour=price
    ),
    times,
    times,
    st.integers(1, 8),
    st.none() | st.floats(0.01, 30),
)


@given(st.lists(vms, max_size=5))
def test_days_add_up_to_the_whole(pasts: list[GoneVm]) -> None:
    days = sum_up_by_day(pasts)
    hours = [(vm, (vm.gone_at - vm.created_at) / 3600) for vm in pasts]
    assert sum(day.vm_hours for day in days.values()) == pytest.approx(sum(h for _, h in hours))
    assert sum(day.gpu_hours for day in days.values()) == pytest.approx(sum(h * vm.gpus for vm, h in hours))
    assert sum(day.cost for day in days.values()) == pytest.approx(sum(h * (vm.price_per_hour or 0) for vm, h in hours))
    assert sum(day.gone for day in days.values()) == len(pasts)
    assert sum(day.gone_with_price for day in days.values()) == sum(vm.price_per_hour is not None for vm in pasts)
    assert all(day.vm_hours <= 24 * len(pasts) + 1e-6 for day in days.values())
