"""The GPT-2 models of the Varuna paper: what is predicted of the runs that it measured, and plans for all six.

    python benchmarks/planner.py paper --json

`measured` are the rows of `examples/planning/observations-*.json`: at the paper's shapes, with attention as it was
then, by the built-in hardware table and by that table fitted to the paper's table 7 (whose rows are marked). `plans` is
what `varuna estimate --model NAME` answers for a fleet like the paper's, with today's attention.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table

from varuna_client.planning.estimates import estimate_document
from varuna_planner.fitting.fitting import fit, predict_observation_s
from varuna_planner.fitting.observations import RateObservation, parse_observations
from varuna_planner.hardware.table import Hardware, built_in
from varuna_planner.profile.models import named_model
from varuna_planner.profile.synthesis import synthesise
from varuna_planner.search.auto_config import choose_plan

OBSERVATIONS = Path(__file__).resolve().parents[1] / "examples" / "planning"
FITTED, OTHERS = "table7", ("table3", "paper")
GPU, NETWORK = "v100-16gb", "ethernet-10g"
EXAMPLES = 153_600_000
"""That the paper's 2.5 billion model was trained on: 18,750 mini-batches of 8192."""
PRICE = 0.612
"""Dollars for a V100 and an hour: a fifth, as the paper has it (section 7.1.1), of the 3.06 of an NC6s_v3 on demand."""


class Fleet(NamedTuple):
    """What a model is planned for."""

    model: str
    gpus: int
    global_batch: int = 8192
    gpu: str = GPU
    offload_optimizer: bool = False


FLEETS = (
    Fleet("gpt2-355m", 64),
    Fleet("gpt2-1.5b", 64),
    Fleet("gpt2-2.5b", 126),
    Fleet("gpt2-8.3b", 126),
    Fleet("gpt2-20b", 294),
    # Parameters and gradients are fp32, with an fp16 copy: a layer takes 19 GiB of a device even without its optimizer.
    Fleet("gpt2-200b", 102, 512, "v100-32gb", True),
)
"""As many GPUs as the paper had for them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(given: argparse.Namespace) -> dict[str, Any]:
    table = built_in()
    fitted = fit(_rows(FITTED), table, gpu=GPU, network=NETWORK).hardware
    measured = [
        _compare(row, table, fitted, was_fitted=name == FITTED) for name in (FITTED, *OTHERS) for row in _rows(name)
    ]
    return {"measured": measured, "plans": [_plan(fleet, table) for fleet in FLEETS]}


def _rows(name: str) -> tuple[RateObservation, ...]:
    path = OBSERVATIONS / f"observations-{name}.json"
    return parse_observations(path.read_text(), lambda profile: (OBSERVATIONS / profile).read_text())


def _compare(row: RateObservation, table: Hardware, fitted: Hardware, *, was_fitted: bool) -> dict[str, Any]:
    def predicted_s(hardware: Hardware) -> float:
        return predict_observation_s(row, hardware.find_gpu(GPU), hardware.find_network(NETWORK), hardware)

    built_in_s, fitted_s = predicted_s(table), predicted_s(fitted)
    return {
        "name": row.label,
        "source": row.source,
        "was_fitted": was_fitted,
        "measured_s": row.minibatch_s,
        "measured_examples_per_s_per_gpu": row.global_batch / row.minibatch_s / row.p / row.d,
        "built_in_s": built_in_s,
        "built_in_error": built_in_s / row.minibatch_s - 1,
        "fitted_s": fitted_s,
        "fitted_examples_per_s_per_gpu": row.global_batch / fitted_s / row.p / row.d,
        "fitted_error": fitted_s / row.minibatch_s - 1,
    }


def _plan(fleet: Fleet, table: Hardware) -> dict[str, Any]:
    shape, device = named_model(fleet.model), table.find_gpu(fleet.gpu)
    choice = choose_plan(
        synthesise(shape, table, fleet.gpu, NETWORK, offload_optimizer=fleet.offload_optimizer),
        gpus=fleet.gpus,
        global_batch=fleet.global_batch,
        device_memory_bytes=device.memory_bytes,
    )
    if choice.best is None:
        raise RuntimeError(f"{fleet.model} on {fleet.gpus} × {fleet.gpu}: {choice.reason}")
    estimate = estimate_document(shape, device, choice.best, gpus=fleet.gpus, price=PRICE, examples=EXAMPLES)
    return {"model": fleet.model, "offload_optimizer": fleet.offload_optimizer, **estimate}


def table(report: dict[str, Any]) -> Group:
    """`report` for people."""
    compared = Table(
        "run", "measured", "ex/s/GPU", "table", "error", "fitted", "error", "ex/s/GPU", title="the paper's runs"
    )
    for row in report["measured"]:
        compared.add_row(
            row["name"] + (" (fitted)" if row["was_fitted"] else ""),
            f"{row['measured_s']:.1f} s",
            f"{row['measured_examples_per_s_per_gpu']:.3g}",
            f"{row['built_in_s']:.1f} s",
            f"{row['built_in_error']:+.1%}",
            f"{row['fitted_s']:.1f} s",
            f"{row['fitted_error']:+.1%}",
            f"{row['fitted_examples_per_s_per_gpu']:.3g}",
        )
    plans = Table(
        "model", "parameters", "on", "plan", "mini-batch", "ex/s/GPU", "memory", "$ per million", "days", title="plans"
    )
    for row in report["plans"]:
        best = row["best"]
        plans.add_row(
            row["model"],
            f"{row['parameters'] / 1e9:.3g} B",
            f"{row['gpus_used']} × {row['gpu']}" + (", offload" if row["offload_optimizer"] else ""),
            f"{best['p']}×{best['d']}, m={best['micro_batch']}",
            f"{row['predicted_minibatch_s']:.1f} s",
            f"{row['examples_per_s_per_gpu']:.3g}",
            f"{max(row['memory_bytes']) / 2**30:.1f} GiB",
            f"{row['cost_per_million_examples']:,.0f}",
            f"{row['hours'] / 24:.1f}",
        )
    return Group(compared, plans)
