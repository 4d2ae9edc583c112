"""`benchmarks/pipeline.py` runs all systems and prints its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT
from varuna_planner.schedule.policies import Policy
from waiting import DEADLINE_S

SCRIPT = ROOT / "benchmarks" / "pipeline.py"


@pytest.mark.slow
def test_the_pipeline_benchmark_compares_all_systems(tmp_path: Path) -> None:
    out = tmp_path / "pipeline.json"
    times = "--forward-ms 2 --recompute-ms 2 --backward-ms 4 --activation-kib 4"
    condition = "--latency-ms 1 --jitter-ms 1 --compute-noise 0.05 --run-ahead 2"
    options = f"--stages 2 --micro-batches 3 --rounds 1 {times} {condition}".split()
    command = [sys.executable, str(SCRIPT), *options, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr

    found = json.loads(out.read_text())
    ours = {policy for policy in Policy if policy.executable}
    means = {row["system"]: row["mean_ms"] for row in found["rows"]}
    assert set(means) == {*ours, "torch-gpipe", "torch-1f1b"}
    for row in found["rows"]:
        assert row["system"] in done.stdout
        assert (row["p"], row["n"], row["latency_ms"], row["jitter_ms"], row["compute_noise"]) == (2, 3, 1, 1, 0.05)
        assert row["run_ahead"] == (4 if row["system"] in ("varuna", "work-conserving") else None)
        # A mini-batch has 3 micro-batches of F, R and B of some 2, 2 and 4 ms.
        assert row["mean_ms"] > 3 * 8 * 0.8
        assert row["lower_bound_ms"] >= 3 * 8
        assert row["to_simulated"] == pytest.approx(row["mean_ms"] / row["simulated_ms"])
        assert row["to_torch_1f1b"] == pytest.approx(row["mean_ms"] / means["torch-1f1b"])
        assert row["to_torch_gpipe"] == pytest.approx(row["mean_ms"] / means["torch-gpipe"])
    # Emulated devices and held-back messages are never early. GPipe's order is fixed, and its longest path crosses the
    # link once in each direction.
    gpipe = next(row for row in found["rows"] if row["system"] == "gpipe")
    assert gpipe["mean_ms"] > gpipe["simulated_ms"] - 2 * gpipe["message_ms"]

    limits = {target["to"]: target["limit"] for target in found["targets"]}
    assert limits == {"simulated": 1.03, "torch-1f1b": 0.87, "torch-gpipe": 0.85}
    for target in found["targets"]:
        assert target["met"] == (target["measured"] <= target["limit"])
        if target["to"] != "simulated":
            assert target["measured"] == pytest.approx(means["work-conserving"] / means[target["to"]])
