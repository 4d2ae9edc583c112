"""`varuna estimate` and `varuna calibrate`: what training would cost on GPUs, before you have them."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varuna_client.commands.options import AsJson, print_document
from varuna_client.errors import UserError
from varuna_client.planning.files import read_hardware, read_text, write_text
from varuna_client.planning.models import (
    BoundariesName,
    FusedAttention,
    GpuName,
    GpusPerVm,
    HardwareFile,
    Heads,
    Hidden,
    KvHeads,
    Layers,
    ModelName,
    NetworkName,
    OffloadOptimizer,
    PinnedD,
    PinnedMicroBatch,
    PinnedP,
    PrecisionName,
    Seq,
    Vocab,
    model_shape,
)
from varuna_client.planning.plans import shape_document, stages_table
from varuna_client.text.render import shape as p_by_d
from varuna_client.text.render import size
from varuna_proto.plan import Plan

if TYPE_CHECKING:
    from varuna_planner.fitting.fitting import Fit
    from varuna_planner.hardware.table import GpuSpec
    from varuna_planner.profile.shapes import ModelShape


def estimate(
    model: ModelName,
    gpu: GpuName,
    network: NetworkName,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs to plan for.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Examples in a mini-batch.")],
    price: Annotated[float | None, typer.Option(min=0, help="Price of one GPU for an hour, in any currency.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Number of examples to give time and cost for.")] = None,
    layers: Layers = None,
    hidden: Hidden = None,
    seq: Seq = None,
    vocab: Vocab = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    precision: PrecisionName = "fp16",
    boundaries: BoundariesName = None,
    fused_attention: FusedAttention = True,
    offload_optimizer: OffloadOptimizer = False,
    gpus_per_vm: GpusPerVm = 1,
    p: PinnedP = None,
    d: PinnedD = None,
    micro_batch: PinnedMicroBatch = None,
    hardware: HardwareFile = None,
    as_json: AsJson = False,
) -> None:
    """Estimate how a model would train on GPUs you do not have yet: plan, rate, memory, time and cost."""
    from varuna_planner.profile.synthesis import HOST_BYTES, synthesise
    from varuna_planner.search.auto_config import Pins, choose_plan  # numba: the other commands start faster without it

    if price is not None and not isfinite(price):
        raise UserError(f"--price {price:g}: give a number")
    shape = model_shape(
        model,
        precision=precision,
        boundaries=boundaries,
        fused_attention=fused_attention,
        layers=layers,
        hidden=hidden,
        seq=seq,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
    )
    table = read_hardware(hardware)
    try:
        device = table.find_gpu(gpu)
        profile = synthesise(shape, table, gpu, network, gpus_per_vm=gpus_per_vm, offload_optimizer=offload_optimizer)
        choice = choose_plan(
            profile,
            gpus=gpus,
            global_batch=global_batch,
            device_memory_bytes=device.memory_bytes,
            gpus_per_vm=gpus_per_vm,
            pins=Pins(p=p, d=d, micro_batch=micro_batch),
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    if choice.best is None:
        raise UserError(f"{gpus} × {gpu}: {choice.reason}")
    document = {
        "model": model,
        **estimate_document(shape, device, choice.best, gpus=gpus, price=price, examples=examples),
        "network": network,
        "boundaries": boundaries,
        "offload_optimizer": offload_optimizer,
    }
    if offload_optimizer:
        stage_parameters = (
            sum(section.parameters for section in shape.list_sections()[first:end])
            for first, end in pairwise((*choice.best.stage_starts, len(shape.list_sections())))
        )
        document["host_memory_bytes"] = max(stage_parameters) * HOST_BYTES
    print_document(document, estimate_page(document), as_json)


def estimate_document(
    shape: ModelShape,
    device: GpuSpec,
    plan: Plan,
    *,
    gpus: int,
    price: float | None,
    examples: int | None,
) -> dict[str, Any]:
    """What --json prints of the plan. GPUs that the plan leaves unused are not counted in rates and costs."""
    used = plan.p * plan.d
    examples_per_s = plan.examples_per_s
    document: dict[str, Any] = {
        "parameters": shape.parameters,
        "gpu": device.name,
        "gpus": gpus,
        "gpus_used": used,
        "global_batch": plan.global_batch,
        "best": shape_document(plan, len(shape.list_sections())),
        "predicted_minibatch_s": plan.predicted_minibatch_s,
        "examples_per_s": examples_per_s,
        "examples_per_s_per_gpu": examples_per_s / used,
        "useful_flop_per_s_per_gpu": shape.flops * examples_per_s / used,
        "memory_bytes": list(plan.memory_bytes),
        "device_memory_bytes": device.memory_bytes,
    }
    if price is not None:
        document["price_per_gpu_hour"] = price
        document["cost_per_hour"] = price * used
        document["cost_per_million_examples"] = price * used * 1e6 / examples_per_s / 3600
    if examples is not None:
        document["examples"] = examples
        document["hours"] = examples / examples_per_s / 3600
        if price is not None:
            document["cost"] = document["hours"] * document["cost_per_hour"]
    return document


def estimate_page(document: dict[str, Any]) -> RenderableType:
    best = document["best"]
    head = Table.grid(padding=(0, 2))
    head.add_row("model", f"{document['model']}, {document['parameters'] / 1e9:.3g} billion parameters")
    unused = document["gpus"] - document["gpus_used"]
    head.add_row(
        "plan",
        Text(
            f"{p_by_d(best['p'], best['d'])}, micro-batch {best['micro_batch']}, {best['policy']}, on "
            f"{document['gpus_used']} × {document['gpu']}" + (f" ({unused} unused)" if unused else ""),
            style="bold",
        ),
    )
    head.add_row("mini-batch", f"{document['predicted_minibatch_s']:.4g} s for {document['global_batch']:,} examples")
    head.add_row(
        "rate",
        f"{document['examples_per_s']:.4g} examples/s, {document['examples_per_s_per_gpu']:.3g} per GPU "
        f"({document['useful_flop_per_s_per_gpu'] / 1e12:.3g} TFLOP/s, recompute not counted)",
    )
    memory = f"at most {size(max(document['memory_bytes']))} of {size(document['device_memory_bytes'])}"
    if "host_memory_bytes" in document:
        memory += f"; of the host's for each GPU {size(document['host_memory_bytes'])}"
    head.add_row("memory", memory)
    if "cost_per_hour" in document:
        head.add_row(
            "cost",
            f"{document['cost_per_hour']:,.2f} an hour, "
            f"{document['cost_per_million_examples']:,.2f} per million examples",
        )
    if "examples" in document:
        cost = f", {document['cost']:,.2f}" if "cost" in document else ""
        head.add_row(f"{document['examples']:,} examples", f"{_time(document['hours'])}{cost}")
    return Group(head, "", stages_table(best["stages"]))


def _time(hours: float) -> str:
    return f"{hours:,.4g} hours" + (f" ({hours / 24:,.1f} days)" if hours >= 48 else "")


def calibrate(
    gpu: GpuName,
    network: NetworkName,
    observations: Annotated[Path, typer.Option(metavar="O.json", help="Measured mini-batch times: a JSON list.")],
    out: Annotated[Path, typer.Option(metavar="HW.json", help="File for the fitted entries.")],
    hardware: HardwareFile = None,
    as_json: AsJson = False,
) -> None:
    """Fit the numbers of a GPU and a network to measured mini-batch times, and show how well they predict."""
    from varuna_planner.fitting.fitting import fit
    from varuna_planner.fitting.observations import parse_observations
    from varuna_planner.hardware.table import Hardware

    table = read_hardware(hardware)
    folder = observations.parent

    def read_beside(name: str) -> str:
        return read_text(folder / name, "profile")

    try:
        rows = parse_observations(read_text(observations, "observations"), read_beside)
        found = fit(rows, table, gpu=gpu, network=network)
    except ValueError as error:
        raise UserError(f"{observations}: {error}" if "observations" in str(error) else str(error)) from None
    entries = Hardware(gpus=(found.hardware.find_gpu(gpu),), networks=(found.hardware.find_network(network),))
    write_text(out, entries.to_json(), "hardware")
    document = calibration_document(found)
    document["out"] = str(out)
    print_document(document, calibration_page(document), as_json)


def calibration_document(found: Fit) -> dict[str, Any]:
    """What --json prints. Errors are relative: 0.02 is a prediction 2 % too long."""
    return {
        "gpu": found.gpu,
        "network": found.network,
        "scales": [
            {
                "name": scale.name,
                "factor": scale.factor,
                "interval": list(scale.interval),
                "learned": scale.learned,
                "verdict": scale.verdict,
                "fields": dict(scale.fields),
            }
            for scale in found.scales
        ],
        "observations": [
            {
                "name": row.name,
                "measured_s": row.measured_s,
                "predicted_s": row.predicted_s,
                "error": row.error,
                "left_out_s": row.left_out_s,
                "left_out_error": row.left_out_error,
            }
            for row in found.observations
        ],
        "mean_error": _mean(found.errors),
        "worst_error": max(found.errors),
        "mean_left_out_error": _mean(found.left_out_errors) if found.left_out_errors else None,
        "worst_left_out_error": max(found.left_out_errors, default=None),
        "confidence": found.confidence,
        "warnings": list(found.warnings),
    }


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def calibration_page(document: dict[str, Any]) -> RenderableType:
    rows = Table("OBSERVATION", "MEASURED", "FITTED", "ERROR", "LEFT OUT", box=None, pad_edge=False)
    for row in document["observations"]:
        left_out = row["left_out_error"]
        rows.add_row(
            row["name"],
            f"{row['measured_s']:.4g} s",
            f"{row['predicted_s']:.4g} s",
            f"{row['error']:+.1%}",
            "-" if left_out is None else f"{left_out:+.1%}",
        )
    scales = Table("SCALE", "FACTOR", "95 %", "VERDICT", box=None, pad_edge=False)
    for scale in document["scales"]:
        low, high = scale["interval"]
        scales.add_row(scale["name"], f"{scale['factor']:.3f}", f"{low:.2f}-{high:.2f}", scale["verdict"])
    summary = f"mean error {document['mean_error']:.1%}, worst {document['worst_error']:.1%}; {document['confidence']}"
    warnings = [Text(f"but {warning}", style="yellow") for warning in document["warnings"]]
    wrote = Text(f"wrote {document['out']}: use it with --hardware {document['out']}")
    return Group(rows, "", scales, "", Text(summary), *warnings, wrote)
