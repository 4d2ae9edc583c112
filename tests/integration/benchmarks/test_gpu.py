"""`benchmarks/gpu.py` runs on the CPU as it does on GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from repository import ROOT
from waiting import DEADLINE_S


@pytest.mark.slow
def test_every_row_trains_and_the_sides_do_the_same_work() -> None:
    sizes = ["--micro-batch", "1", "--micro-batches", "2", "--steps", "1", "--warm-up", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", *sizes, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["side"], row["p"], row["d"]) for row in rows] == [
        *[("varuna", 1, 1), ("plain", 1, 1), ("varuna", 1, 2), ("varuna", 2, 1), ("ddp", 1, 2)]
    ]
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * len(rows), rel=1e-2)
    assert all(
        row["tokens_per_s"] == pytest.approx(row["p"] * row["d"] * row["tokens_per_s_per_device"]) for row in rows
    )
    assert all(row["mfu"] is None for row in rows)  # of no GPU


def test_a_row_that_fails_says_why() -> None:
    sizes = ["--size", "gpt2-355m", "--micro-batches", "1", "--steps", "1", "--limit-s", "0.01"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", *sizes, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {row["failed"] for row in json.loads(done.stdout)["rows"]} == {"it took more than 0.01 s (--limit-s)"}
