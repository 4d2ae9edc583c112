"""What GPUs of several types give together: plans over them beside the best plan of one type alone.

Profiles are those of the hardware table. The bound is what all GPUs would give if each added its part: the rates of the
types alone, summed, where every type can hold the model; else none is shown.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

from rich.table import Table

from varuna_planner.hardware.table import built_in
from varuna_planner.profile.models import named_model
from varuna_planner.profile.synthesis import synthesise
from varuna_planner.search.auto_config import choose_plan
from varuna_planner.search.layouts import describe_gpu_types
from varuna_planner.search.mixed import TypedGpus, choose_mixed_plan


class MixedCase(NamedTuple):
    """One row."""

    model: str
    global_batch: int
    gpus: tuple[tuple[str, int], ...]
    """By name in the hardware table."""


V100, A100, H100 = "v100-16gb", "a100-40gb", "h100-80gb"
CASES = (
    MixedCase("gpt2-355m", 512, ((V100, 4), (A100, 2))),
    MixedCase("gpt2-2.5b", 2400, ((V100, 5), (A100, 1))),
    MixedCase("gpt2-2.5b", 2400, ((V100, 8), (A100, 2))),
    MixedCase("gpt2-2.5b", 2400, ((V100, 60), (A100, 20))),
    MixedCase("gpt2-2.5b", 8192, ((V100, 500), (A100, 300))),
    MixedCase("gpt2-8.3b", 8192, ((V100, 500), (A100, 300), (H100, 40))),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mixed`."""
    parser.add_argument("--network", default="ethernet-10g", help="of the hardware table")


def run(given: argparse.Namespace) -> dict[str, Any]:
    """The figures of `mixed`."""
    return {"network": given.network, "rows": [_plan(case, given.network) for case in CASES]}


def _plan(case: MixedCase, network: str) -> dict[str, Any]:
    hardware = built_in()
    groups = [
        TypedGpus(
            gpu_type=name,
            gpus=count,
            profile=synthesise(named_model(case.model), hardware, name, network),
            device_memory_bytes=hardware.find_gpu(name).memory_bytes,
        )
        for name, count in case.gpus
    ]
    alone = {}
    for group in groups:
        best = choose_plan(
            group.profile,
            gpus=group.gpus,
            global_batch=case.global_batch,
            device_memory_bytes=group.device_memory_bytes,
        ).best
        alone[group.gpu_type] = 0.0 if best is None else best.examples_per_s
    choose_mixed_plan(groups, global_batch=case.global_batch)  # warm
    began = time.perf_counter()
    plan = choose_mixed_plan(groups, global_batch=case.global_batch).best
    took_ms = (time.perf_counter() - began) * 1e3
    assert plan is not None, case
    return {
        "model": case.model,
        "global_batch": case.global_batch,
        "gpus": dict(case.gpus),
        "examples_per_s": plan.examples_per_s,
        "alone_examples_per_s": alone,
        "of_best_alone": plan.examples_per_s / max(alone.values()) if max(alone.values()) else None,
        "of_sum": plan.examples_per_s / sum(alone.values()) if all(alone.values()) else None,
        "shape": f"{plan.p}×{plan.d}",
        "types": describe_gpu_types(plan) or f"all {plan.gpu_types[0]}",
        "took_ms": took_ms,
    }


def table(report: dict[str, Any]) -> Table:
    """`report` for people."""
    heads = ("model", "batch", "GPUs", "ex/s", "of the best alone", "of all alone, summed", "plan", "ms")
    shown = Table(*heads, title=f"GPUs of several types, {report['network']}")
    for row in report["rows"]:
        shown.add_row(
            row["model"],
            f"{row['global_batch']:,}",
            ", ".join(f"{count} {name}" for name, count in row["gpus"].items()),
            f"{row['examples_per_s']:.4g}",
            "-" if row["of_best_alone"] is None else f"{row['of_best_alone']:.2f}",
            "-" if row["of_sum"] is None else f"{row['of_sum']:.2f}",
            f"{row['shape']}: {row['types']}",
            f"{row['took_ms']:.0f}",
        )
    return shown
