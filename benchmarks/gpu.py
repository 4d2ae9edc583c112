"""One page about Varuna on this machine's GPUs: tokens/s, MFU and memory of GPT-2, beside plain PyTorch and DDP.

Each row trains in fresh processes, one for each GPU that it uses, as the planner would have it: the plan's time and
memory are predicted from the model's shape and the hardware table, and stand beside what was measured. A row that fails
says why, and the others go on.

    python benchmarks/gpu.py                                   # gpt2-355m on all GPUs
    python benchmarks/gpu.py --size gpt2-2.5b --micro-batch 2
    python benchmarks/gpu.py --device cpu --size tiny          # the same code without a GPU

MFU is the share of the GPU's peak in the products of forward and backward; recompute does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from varuna.devices.accelerator import find_accelerator
from varuna.devices.cuda_alone import device_model
from varuna_planner.hardware.table import GpuSpec, built_in
from varuna_planner.memory import human
from varuna_planner.profile.models import NAMED_MODELS
from varuna_planner.profile.shapes import ModelFamily, ModelShape, NumberFormat
from varuna_planner.profile.synthesis import synthesise
from varuna_planner.search.auto_config import choose_plan
from varuna_planner.search.pins import Pins
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
RANK = ROOT / "benchmarks" / "_gpu_rank.py"
SIMULATED = ROOT / "tests" / "accelerator"
WITHOUT_GPU = "h100-80gb"
"""The entry of the table whose times are predicted where there is no GPU."""
TINY = ModelShape(family=ModelFamily.GPT2, layers=9, hidden=128, heads=4, seq=128, vocab=256)
TORCH_NAMES = {NumberFormat.FP32: "float32", NumberFormat.FP16: "float16", NumberFormat.BF16: "bfloat16"}


@dataclass(frozen=True)
class Machine:
    """What the ranks run on."""

    kind: str
    """cpu, sim, cuda, ..."""
    count: int
    model: str
    gpu: GpuSpec
    is_known: bool
    """Whether `gpu` is this machine's."""


@dataclass(frozen=True)
class Row:
    """Who trains, on P × D devices."""

    side: str
    """varuna, plain or ddp."""
    p: int = 1
    d: int = 1
    links: str = "gloo"
    """What carries messages between stages: the argument of `Varuna`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "sim"), default="auto", help="sim: tests/accelerator")
    parser.add_argument("--gpu", help="its name in the hardware table (varuna estimate), if it is not found by itself")
    parser.add_argument("--size", choices=("tiny", *(n for n in NAMED_MODELS if n.startswith("gpt2"))), default="")
    parser.add_argument("--precision", type=NumberFormat, choices=list(NumberFormat), default=NumberFormat.BF16)
    parser.add_argument("--micro-batch", type=int, default=4, help="examples in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=16, help="micro-batches of each replica in a step")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured, after --warm-up")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest time of a row")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    machine = find_machine(given.device, given.gpu)
    given.size = given.size or ("tiny" if machine.kind in ("cpu", "sim") else "gpt2-355m")
    rows = [measure_row(row, machine, given) for row in list_rows(machine)]
    report = {
        "device": machine.model,
        "devices": machine.count,
        "torch": torch.__version__,
        "size": given.size,
        "precision": given.precision.value,
        "micro_batch": given.micro_batch,
        "micro_batches": given.micro_batches,
        "rows": rows,
    }
    print(json.dumps(report, indent=2) if given.json else render_page(report))
    sys.exit(any("failed" in row for row in rows))


def find_machine(device: str, named: str | None) -> Machine:
    accelerator = find_accelerator() if device == "auto" else None
    kind = str(accelerator or ("cpu" if device == "auto" else device))
    count = 2 if accelerator is None else torch.accelerator.device_count()
    model = "no GPU" if accelerator is None else device_model(torch.device(kind, 0))
    table = built_in()
    gpu = table.find_gpu(named) if named else match_gpu(model)
    return Machine(kind, count, model, gpu or table.find_gpu(WITHOUT_GPU), gpu is not None)


def match_gpu(model: str) -> GpuSpec | None:
    """The table's entry for a model such as "NVIDIA H100 80GB HBM3"; None: there is none, or more than one."""
    words = re.split(r"[^a-z0-9]+", model.lower())
    found = [gpu for gpu in built_in().gpus if set(gpu.name.split("-")) <= set(words)]
    return found[0] if len(found) == 1 else None


def list_rows(machine: Machine) -> list[Row]:
    n = machine.count
    rows = [Row("varuna"), Row("plain")]
    if n > 1:
        rows += [Row("varuna", d=n), Row("varuna", p=n)]
        if machine.kind == "cuda":
            rows.append(Row("varuna", p=n, links="nccl"))
        if machine.kind in ("cpu", "cuda"):  # others have no collectives that DDP can use
            rows.append(Row("ddp", d=n))
    if n >= 4 and n % 2 == 0:
        rows.append(Row("varuna", p=2, d=n // 2))
    return rows


def measure_row(row: Row, machine: Machine, given: argparse.Namespace) -> dict[str, Any]:
    shape = replace_precision(TINY if given.size == "tiny" else NAMED_MODELS[given.size], given.precision)
    plan = make_plan(row, machine, shape, given)
    try:
        ranks = run_ranks(row, machine, plan, given)
    except RuntimeError as error:
        return {**asdict(row), "failed": str(error)}
    step_s = max(rank["step_s"] for rank in ranks)
    devices = row.p * row.d
    examples_per_s = plan.global_batch / step_s
    peak = machine.gpu.peak_flop_per_s.get(given.precision)
    return {
        **asdict(row),
        "loss": ranks[0]["loss"],
        "step_s": step_s,
        "tokens_per_s": examples_per_s * shape.seq,
        "tokens_per_s_per_device": examples_per_s * shape.seq / devices,
        "mfu": shape.flops * examples_per_s / devices / peak if peak and machine.is_known else None,
        "peak_bytes": [rank["peak_bytes"] for rank in ranks[: row.p]],
        "predicted_bytes": list(plan.memory_bytes) if row.side == "varuna" else None,
        "predicted_step_s": plan.predicted_minibatch_s if row.side == "varuna" and machine.is_known else None,
    }


def replace_precision(shape: ModelShape, precision: NumberFormat) -> ModelShape:
    return ModelShape(**{**asdict(shape), "precision": precision})


def make_plan(row: Row, machine: Machine, shape: ModelShape, given: argparse.Namespace) -> Plan:
    """The planner's, in the shape of the row."""
    m, gpu = given.micro_batch, machine.gpu
    profile = synthesise(shape, built_in(), gpu.name, "ethernet-100g", gpus_per_vm=machine.count, micro_batches=[m])
    choice = choose_plan(
        profile,
        gpus=row.p * row.d,
        global_batch=m * given.micro_batches * row.d,
        device_memory_bytes=gpu.memory_bytes,
        gpus_per_vm=machine.count,
        pins=Pins(p=row.p, d=row.d, micro_batch=m),
    )
    if choice.best is None:
        raise SystemExit(f"{row.p}×{row.d}: {choice.reason}")
    return choice.best


def run_ranks(row: Row, machine: Machine, plan: Plan, given: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank wrote. Raises RuntimeError with the last line of the first one that failed."""
    wanted = {
        "side": row.side,
        "links": row.links,
        "size": given.size,
        "precision": TORCH_NAMES[given.precision],
        **{name: getattr(given, name) for name in ("micro_batch", "micro_batches", "steps", "warm_up")},
    }
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for rank 0, which listens there
        outs = [Path(folder) / f"rank{rank}.json" for rank in range(row.p * row.d)]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), json.dumps(wanted), str(out)],
                env={**os.environ, **make_environment(rank, row, machine, plan, held.getsockname()[1])},
                stdout=subprocess.DEVNULL,
                stderr=out.with_suffix(".log").open("wb"),
            )
            for rank, out in enumerate(outs)
        ]
        try:
            codes = [rank.wait(given.limit_s) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {given.limit_s:g} s (--limit-s)") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            lines = outs[next(i for i, code in enumerate(codes) if code)].with_suffix(".log").read_text().splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit codes {codes}")
        return [json.loads(out.read_text()) for out in outs]


def make_environment(rank: int, row: Row, machine: Machine, plan: Plan, port: int) -> dict[str, str]:
    device = "cpu" if machine.kind == "cpu" else f"{machine.kind}:{rank}"
    worker = WorkerEnvironment(
        job_id="gpu-benchmark",
        generation=1,
        mode=Mode.TRAIN,
        rank=rank,
        local_rank=rank,
        world_size=row.p * row.d,
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
        plan=plan,
        device=device,
    )
    environment = {**worker.to_environ(), "VARUNA_DEVICE": device}
    if machine.kind == "sim":
        environment["PYTHONPATH"] = os.pathsep.join([str(SIMULATED), str(SIMULATED / "entry_points")])
        environment["SIM_DEVICES"] = str(machine.count)
    return environment


def render_page(report: dict[str, Any]) -> str:
    names = ("tokens/s", 12), ("per GPU", 10), ("MFU", 7), ("step s", 10), ("plan s", 10)
    lines = [
        f"{report['size']}, {report['precision']}, {report['micro_batches']} micro-batches of {report['micro_batch']} "
        f"on each replica; {report['devices']} × {report['device']}, torch {report['torch']}",
        f"{'':12}P×D   " + "".join(f"{name:>{width}}" for name, width in names) + "  peak memory (plan), by stage",
    ]
    return "\n".join(lines + [render_row(row) for row in report["rows"]])


def render_side(row: dict[str, Any]) -> str:
    return str(row["side"] if row["links"] == "gloo" else f"{row['side']}+{row['links']}")


def render_row(row: dict[str, Any]) -> str:
    head = f"{render_side(row):12}{row['p']}×{row['d']:<4}"
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    mfu = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    planned = "-" if row["predicted_step_s"] is None else f"{row['predicted_step_s']:.3f}"
    expected = row["predicted_bytes"] or [None] * len(row["peak_bytes"])
    memory = ", ".join(
        ("-" if peak is None else human(peak)) + ("" if plan is None else f" ({human(plan)})")
        for peak, plan in zip(row["peak_bytes"], expected, strict=True)
    )
    return (
        f"{head}{row['tokens_per_s']:>12,.0f}{row['tokens_per_s_per_device']:>10,.0f}{mfu:>7}"
        f"{row['step_s']:>10.3f}{planned:>10}  {memory}"
    )


if __name__ == "__main__":
    main()
