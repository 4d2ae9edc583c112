"""Reports of the benchmarks beside the recovery one: peers (torchrun, torchft), and the cost of undisturbed steps."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import recovery_overhead
import recovery_peers


def make_trial(row: str, gap_s: float, **more: Any) -> dict[str, Any]:
    times = dict.fromkeys(recovery_peers.COLUMNS, 1.0) | {"gap_s": gap_s, "cost_s": gap_s}
    return {"state": "22MB", "row": row, "shape_before": "1×4", "steps_redone": 0, **times, **more}


def test_peers_are_compared_with_varuna_by_medians() -> None:
    trials = [make_trial("varuna", gap) for gap in (0.5, 1.0, 0.9)]
    trials.append(make_trial("torchft", 4.5, steps_discarded=1))
    own, other = recovery_peers.make_report(trials)["rows"]
    assert own["to_varuna"] == {"gap_s": 1.0, "cost_s": 1.0}
    assert other["to_varuna"] == pytest.approx({"gap_s": 5.0, "cost_s": 5.0})
    assert other["steps_discarded"]["each"] == [1]
    assert "4.50 (4.50)" in recovery_peers.render(recovery_peers.make_report(trials))


def test_a_run_without_varuna_has_no_ratios() -> None:
    report = recovery_peers.make_report([make_trial("torchrun", 4.5)])
    assert report["rows"][0]["to_varuna"] is None
    assert "torchrun" in recovery_peers.render(report)


def test_rows_of_torchft_are_left_out_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["varuna", "torchft", "torchrun"]
    monkeypatch.setitem(sys.modules, "torchft", None)
    assert recovery_peers.list_rows(rows) == ["varuna", "torchrun"]
    assert "torchft is not installed" in capsys.readouterr().err


def test_the_ratio_of_pairs_is_their_geometric_mean_and_the_interval_holds_it() -> None:
    noise = random.Random(1)
    pairs = [(1.02 * noise.uniform(0.95, 1.05) * base, base) for base in (0.1, 0.5, 1.0) for _ in range(10)]
    report = recovery_overhead.make_report(pairs)
    low, high = report["interval"]
    assert 0.98 < low < report["ratio"] < high < 1.06
    assert recovery_overhead.make_report([(2.0, 1.0), (0.5, 1.0)])["ratio"] == pytest.approx(1.0)


def test_pairs_that_are_all_alike_leave_no_doubt() -> None:
    assert recovery_overhead.make_report([(1.5, 1.0)] * 5)["interval"] == pytest.approx([1.5, 1.5])
