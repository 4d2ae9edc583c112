"""The page of `benchmarks/gpu.py`: which rows a machine gets, and what a row says."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest

from repository import ROOT
from varuna_planner.hardware.table import built_in

sys.path.append(str(ROOT / "benchmarks"))

import gpu


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", None),
        ("no GPU", None),
    ],
)
def test_a_gpu_is_found_in_the_table_by_its_model(model: str, name: str | None) -> None:
    found = gpu.match_gpu(model)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("kind", "count", "rows"),
    [
        ("cuda", 1, ["varuna 1×1", "plain 1×1"]),
        ("sim", 2, ["varuna 1×1", "plain 1×1", "varuna 1×2", "varuna 2×1"]),
        (
            "cuda",
            4,
            ["varuna 1×1", "plain 1×1", "varuna 1×4", "varuna 4×1", "varuna+nccl 4×1", "ddp 1×4", "varuna 2×2"],
        ),
    ],
)
def test_the_rows_use_all_gpus(kind: str, count: int, rows: list[str]) -> None:
    machine = gpu.Machine(kind, count, "", built_in().find_gpu("h200"), True)
    assert [f"{gpu.render_side(asdict(row))} {row.p}×{row.d}" for row in gpu.list_rows(machine)] == rows


def test_a_row_says_what_was_measured_beside_what_was_planned() -> None:
    row = {
        "side": "varuna",
        "p": 2,
        "d": 1,
        "links": "gloo",
        "tokens_per_s": 31000.4,
        "tokens_per_s_per_device": 15500.2,
        "mfu": 0.412,
        "step_s": 1.25,
        "predicted_step_s": 1.2,
        "peak_bytes": [3 << 30, 2 << 30],
        "predicted_bytes": [3 << 30, 1 << 30],
    }
    text = " ".join(gpu.render_row(row).split())
    assert text == "varuna 2×1 31,000 15,500 41.2 % 1.250 1.200 3.0 GiB (3.0 GiB), 2.0 GiB (1.0 GiB)"
    failed = {"side": "ddp", "p": 1, "d": 4, "links": "gloo", "failed": "CUDA out of memory"}
    assert gpu.render_row(failed).endswith("failed: CUDA out of memory")
