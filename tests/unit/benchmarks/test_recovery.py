"""The recovery benchmark (benchmarks/): the gap around a kill, the steps redone, and the report."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import _recovery_trial as trial_module
import recovery


def record(*steps: tuple[int, float]) -> list[trial_module.StepLine]:
    text = "".join(f"{pid} {step} {at}\n" for step, at in steps for pid in (1, 2))
    return trial_module.parse_record(text + "1 99")  # the last line is not whole yet


def test_a_gap_in_place_redoes_nothing() -> None:
    gap = trial_module.find_gap(record((1, 1.0), (2, 2.0), (3, 3.7), (4, 4.7)), killed_at=2.5)
    assert gap == pytest.approx((1.7, 2, 3))
    assert gap.steps_redone == 0


def test_a_restart_redoes_the_steps_after_its_checkpoint() -> None:
    gap = trial_module.find_gap(record((1, 1.0), (2, 2.0), (3, 3.0), (2, 9.0), (3, 10.0), (4, 11.0)), killed_at=3.5)
    assert gap == pytest.approx((6.0, 3, 2))
    assert gap.steps_redone == 2


def test_the_step_under_way_may_still_end_after_the_kill() -> None:
    gap = trial_module.find_gap(record((1, 1.0), (2, 2.0), (3, 3.0), (3, 9.0)), killed_at=2.9)
    assert gap == pytest.approx((6.0, 3, 3))
    assert gap.steps_redone == 1


def test_there_is_no_gap_without_steps_on_both_sides() -> None:
    with pytest.raises(ValueError, match="no steps on both sides"):
        trial_module.find_gap(record((1, 1.0)), killed_at=2.0)


def test_the_duration_of_a_step_is_that_of_the_newest_ones() -> None:
    slow_first = [(1, 0.0), (2, 50.0), *((step, 50.0 + step) for step in range(3, 20))]
    assert trial_module.median_step_s(record(*slow_first)) == pytest.approx(1.0)


def make_trial(row: str, gap_s: float, redone: int, growth: dict[str, Any] | None) -> dict[str, Any]:
    kind = "reshape" if row == "in place" else "restart"
    return {
        "state": "22MB",
        "row": row,
        "shape_before": "2×2",
        "shape_after": "2×1",
        "kind_of_morph": kind,
        "gap_s": gap_s,
        "pause_s": gap_s - 0.5,
        "steps_redone": redone,
        "micro_batches_redone": 4 if row == "in place" else None,
        "micro_batches": 8,
        "cost_s": gap_s + redone,
        "kept_bytes": 22e6,
        "peer_bytes": 0,
        "checkpoint_bytes": 0,
        "step_before_s": 1.0,
        "step_after_s": 0.5,
        "reported": {"seconds_without_progress": gap_s, "steps_redone": redone, "downtime": {"stop": gap_s / 2}},
        "growth": growth,
    }


def test_the_report_has_medians_each_value_and_ratios() -> None:
    taken = {"kept": 0, "peers": 22_000_000, "store": 0}
    growth = {"seconds_without_progress": 3.0, "steps_redone": 0, "state_from": taken}
    trials = [make_trial("in place", gap, 0, growth) for gap in (1.0, 2.0, 1.5)]
    trials += [make_trial("restart", gap, 3, None) for gap in (6.0, 5.0)]
    report = recovery.make_report(trials)
    own, other = report["rows"]
    assert own["gap_s"] == {"median": 1.5, "each": [1.0, 2.0, 1.5]}
    assert (own["reshapes"], other["reshapes"]) == (3, 0)
    assert own["parts_s"]["stop"]["median"] == 0.75
    assert (own["growths"], other["growths"]) == (3, 0)
    assert own["growth_from"] == [taken] * 3
    ratios = report["restart_to_row"]["22MB"]["in place"]
    assert ratios["gap_s"] == pytest.approx(5.5 / 1.5)
    assert ratios["cost_s"] == pytest.approx(8.5 / 1.5)
    assert ratios["growth_s"] is None, "the restarts did not grow"
    text = recovery.render(report)
    assert "1.50 (1.00, 2.00, 1.50)" in text
    assert "3 of 3 by reshape" in text
    assert "micro-batches redone of 8: 4, 4, 4" in text
    assert "micro-batches redone of 8: unknown, unknown" in text


def test_a_run_that_ended_before_its_first_trial_has_an_empty_report() -> None:
    assert "restart ÷ row" in recovery.render(recovery.make_report([]))


def test_sizes_are_the_states_that_they_are_named_for() -> None:
    sizes = [recovery.SIZES[name].state_bytes for name in ("22MB", "200MB", "1.2GB", "4.8GB")]
    assert sizes == pytest.approx([22e6, 200e6, 1.2e9, 4.8e9], rel=0.01)
