from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.checkpoint import Cadence, next_save_due

stalls = st.floats(min_value=0, max_value=5)


@settings(deadline=None)
@given(stalls, st.floats(min_value=0, max_value=60), st.floats(min_value=0.01, max_value=3))
def test_stalls_stay_within_their_share_of_the_time(stall_s: float, write_s: float, step_s: float) -> None:
    now_s, last_save_s, stalled_s, saves = 0.0, 0.0, 0.0, 0
    for _ in range(3000):
        now_s += step_s
        writing = saves > 0 and now_s < last_save_s + stall_s + write_s
        due, _reason = next_save_due(
            now_s,
            last_save_s=last_save_s,
            last_stall_s=stall_s,
            last_write_s=write_s,
            in_flight=writing,
        )
        if due:
            assert not writing
            last_save_s, saves = now_s, saves + 1
            now_s += stall_s
            stalled_s += stall_s
    assert stalled_s <= 0.01 * now_s + stall_s


@given(st.floats(min_value=0, max_value=1e6))
def test_nothing_is_due_while_a_save_is_in_flight(since_s: float) -> None:
    due, reason = next_save_due(since_s, last_save_s=0, last_stall_s=0.1, last_write_s=0.1, in_flight=True)
    assert not due
    assert "being written" in reason


def test_the_first_save_comes_after_the_shortest_interval() -> None:
    cadence = Cadence(min_interval_s=2.0)
    ask = {"last_save_s": 10.0, "last_stall_s": None, "last_write_s": None, "in_flight": False, "cadence": cadence}
    assert not next_save_due(11.9, **ask)[0]  # type: ignore[arg-type]
    assert next_save_due(12.0, **ask)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"stall_share": 0.0}, {"write_share": 1.5}, {"min_interval_s": -1.0}])
def test_a_cadence_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Cadence(**wrong)
