"""`benchmarks/pipeline.py` runs all systems and says what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from varuna_planner.schedule import Policy

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


def test_the_pipeline_benchmark_compares_all_systems(tmp_path: Path) -> None:
    out = tmp_path / "pipeline.json"
    times = "--forward-ms 2 --recompute-ms 2 --backward-ms 4 --activation-kib 4 --jitter-ms 1"
    command = [sys.executable, str(SCRIPT), *f"--stages 2 --micro-batches 3 --rounds 1 {times}".split()]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr

    rows = json.loads(out.read_text())["rows"]
    assert {row["system"] for row in rows} == {*Policy, "torch-gpipe", "torch-1f1b"}
    for row in rows:
        assert row["system"] in done.stdout
        # 3 micro-batches of F, R and B of 2, 2 and 4 ms; a device that sleeps is never early.
        assert row["mean_ms"] >= row["lower_bound_ms"] >= 3 * 8
        assert row["to_torch_1f1b"] > 0
        assert row["to_torch_gpipe"] > 0
        assert (row["simulated_ms"] is None) == row["system"].startswith("torch")
