"""The recovery benchmark (benchmarks/): the gap around a kill, the steps redone, and the report."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import _recovery_figures as figures
import recovery
from _recovery_memory import MemorySample, find_extra_bytes


def record(*steps: tuple[int, float]) -> list[figures.StepLine]:
    text = "".join(f"{pid} {step} {at}\n" for step, at in steps for pid in (1, 2))
    return figures.parse_record(text + "1 99")  # the last line is not whole yet


def test_a_gap_in_place_redoes_nothing() -> None:
    gap = figures.find_gap(record((1, 1.0), (2, 2.0), (3, 3.7), (4, 4.7)), killed_at=2.5, recovered_step=3)
    assert gap == pytest.approx((1.7, 2, 3, 3.7))
    assert gap.steps_redone == 0


def test_a_restart_redoes_the_steps_after_its_checkpoint() -> None:
    lines = record((1, 1.0), (2, 2.0), (3, 3.0), (2, 9.0), (3, 10.0), (4, 11.0))
    gap = figures.find_gap(lines, killed_at=3.5, recovered_step=2)
    assert gap == pytest.approx((6.0, 3, 2, 9.0))
    assert gap.steps_redone == 2


def test_the_step_under_way_may_still_end_after_the_kill() -> None:
    gap = figures.find_gap(record((1, 1.0), (2, 2.0), (3, 3.0), (3, 9.0)), killed_at=2.9, recovered_step=3)
    assert gap == pytest.approx((6.0, 3, 3, 9.0))
    assert gap.steps_redone == 1


def test_a_machine_that_stands_still_later_is_not_the_gap() -> None:
    gap = figures.find_gap(record((1, 1.0), (2, 2.0), (3, 3.7), (4, 90.0)), killed_at=2.5, recovered_step=3)
    assert gap == pytest.approx((1.7, 2, 3, 3.7))


def test_there_is_no_gap_without_steps_on_both_sides() -> None:
    with pytest.raises(ValueError, match="no steps on both sides"):
        figures.find_gap(record((1, 1.0)), killed_at=2.0, recovered_step=2)


def test_the_duration_of_a_step_is_that_of_the_newest_ones() -> None:
    slow_first = [(1, 0.0), (2, 50.0), *((step, 50.0 + step) for step in range(3, 20))]
    assert figures.median_step_s(record(*slow_first)) == pytest.approx(1.0)


def test_idle_is_the_longest_time_in_which_no_process_computes() -> None:
    waits = figures.parse_activity("4.0 5.0\n0.0 2.0\n1.0 3.0\n5.5 6.0\n9.0 9.")  # two processes; one line not whole
    assert figures.find_idle(waits, 0.0, 6.0) == pytest.approx(1.0), "from 3 to 4, because the first two overlap"
    assert figures.find_idle(waits, 0.0, 9.0) == pytest.approx(3.0), "until the end, which has no wait after it"
    assert figures.find_idle(waits, 4.2, 5.6) == pytest.approx(0.5), "waits from before and after count in part"
    assert figures.find_idle([], 1.0, 3.0) == pytest.approx(2.0)


def test_a_turn_leaves_its_first_step_out() -> None:
    lines = record((1, 1.0), (2, 2.0), (3, 50.0), (4, 51.0), (5, 52.5), (6, 53.0))
    assert figures.measure_turn(lines, 3, 6) == pytest.approx(1.0)


def test_extra_memory_is_over_the_peak_before_of_the_survivor_that_needs_most() -> None:
    used = [(1.0, 10, 10, 10), (2.0, 30, 10, 10), (3.0, 20, 15, 99), (4.0, 31, 12, 0)]
    samples = [MemorySample(at, {"a": a, "b": b, "lost": lost}) for at, a, b, lost in used]
    assert find_extra_bytes(samples, 2.5, ["a", "b"]) == 5
    assert find_extra_bytes(samples, 9.0, ["a", "b"]) is None, "nothing was sampled after the kill"
    assert find_extra_bytes(samples, 2.5, []) is None


def make_trial(row: str, gap_s: float, redone: int, growth: dict[str, Any] | None) -> dict[str, Any]:
    kind = "reshape" if row == "in place" else "restart"
    return {
        "state": "22MB",
        "row": row,
        "shape_before": "2×2",
        "shape_after": "2×1",
        "kind_of_morph": kind,
        "kill_at": 0.5,
        "gap_s": gap_s,
        "idle_s": gap_s / 4,
        "idle_before_s": 0.1,
        "extra_bytes": 5e6,
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
    assert own["extra_bytes"]["median"] == 5e6
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


def test_several_kill_points_are_groups_of_their_own() -> None:
    assert recovery.name_state("22MB", 0.5, kill_points=1) == "22MB"
    trials = [
        make_trial("in place", gap, 0, None) | {"state": recovery.name_state("22MB", kill_at, 2), "kill_at": kill_at}
        for kill_at, gap in ((0.8, 3.0), (0.2, 1.0), (0.2, 2.0))
    ]
    report = recovery.make_report(trials)
    assert [row["state"] for row in report["rows"]] == ["22MB@0.8", "22MB@0.2"]
    assert all(row["state_bytes"] == recovery.SIZES["22MB"].state_bytes for row in report["rows"])
    early, late = report["kill_points"]
    assert (early["kill_at"], early["trials"], early["pause_s"]) == (0.2, 2, pytest.approx(1.0))
    assert (late["kill_at"], late["pause_s"], late["excess_s"]) == (0.8, pytest.approx(2.5), pytest.approx(2.0))
    assert early["lost_share"] == 4, "half of the 8 micro-batches, because D was 2"
    assert "4, 4; 4.0; 8" in recovery.render(report)


@pytest.mark.parametrize("text", ["2", "2x", "0x2", "ax2", "2x2x2"])
def test_a_shape_that_is_none_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no shape"):
        recovery.parse_shape(text)


def test_a_shape_is_stages_and_replicas() -> None:
    assert recovery.parse_shape("2x3") == (2, 3)
