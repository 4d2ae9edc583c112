"""Memory that activation checkpointing saves under data parallelism: Varuna's one stage beside DistributedDataParallel.

Two replicas over gloo train the network of `examples/gradient_checkpointing`, the same examples in each case, without
dropout. `peak` is what a rank takes for training at its highest: parameters, gradients, Adam, buckets, activations. On
a CPU it is the process's peak of resident memory within a step (VmHWM, reset before it) above what was resident before
the model was built, with malloc set to give large blocks back at once; on GPUs, where each rank has one, it is
torch.cuda.max_memory_allocated(). `error` is how far the gradients, which must be the same on both ranks to the last
bit, are from those of one process of plain PyTorch on the whole batch, relative to their norm.

    python benchmarks/gradient_checkpointing.py --json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gradient_checkpointing"))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch import distributed as dist  # noqa: E402

from model import Examples, Net  # noqa: E402
from varuna import Varuna  # noqa: E402
from varuna_proto.environment import Mode, WorkerEnvironment  # noqa: E402
from varuna_proto.plan import Plan  # noqa: E402

RANKS = 2
BLOCKS, WIDTH = 16, 128
LIMIT_S = 300.0


class MemoryCase(NamedTuple):
    """One row."""

    system: str
    chunks: int
    """Runs of blocks that are checkpointed; 0: none."""
    micro_batches: int = 1
    """Of a replica's share of the batch."""

    @property
    def name(self) -> str:
        name = f"{self.system}, {f'{self.chunks} chunks' if self.chunks else 'no checkpoints'}"
        return name + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")


CASES = (
    *(MemoryCase("DDP", chunks) for chunks in (0, 4, 8)),
    *(MemoryCase("Varuna", chunks) for chunks in (0, 4, 8)),
    MemoryCase("Varuna", 0, 8),
    MemoryCase("Varuna", 4, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=4096, help="of one replica's share of the batch")
    parser.add_argument("--steps", type=int, default=2, help="that are measured, after one that is not")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.as_rank is not None:
        print(json.dumps(measure(MemoryCase(*json.loads(given.as_rank)), given.examples, given.steps)))
        return
    report = run(given)
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        Console().print(table(report))


def run(given: argparse.Namespace) -> dict[str, Any]:
    reference = build_model(0)
    reference(**Examples(RANKS * given.examples).batch(RANKS * given.examples)).backward()
    expected = _flat_gradients(reference)
    rows = [_compare(case, given, expected) for case in CASES]
    return {
        "rows": rows,
        "ranks": RANKS,
        "examples_per_rank": given.examples,
        "parameter_mib": sum(p.numel() for p in reference.parameters()) * 4 / 2**20,
        "device": _device(0).type,
        "torch": torch.__version__,
    }


def _compare(case: MemoryCase, given: argparse.Namespace, expected: Tensor) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        ranks = _run_ranks(case, given, Path(name))
        gradients = torch.load(Path(name) / "gradients.pt")
    if len({rank["digest"] for rank in ranks}) > 1:
        raise RuntimeError(f"{case.name}: the ranks have different gradients")
    return {
        "name": case.name,
        **case._asdict(),
        "peak_mib": max(rank["peak_bytes"] for rank in ranks) / 2**20,
        "step_ms": max(rank["step_ms"] for rank in ranks),
        "error": float((gradients - expected).norm() / expected.norm()),
    }


def _run_ranks(case: MemoryCase, given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Each rank's results. Raises RuntimeError with the last lines of one that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(HERE), "--as-rank", json.dumps(case)]
    command += ["--examples", str(given.examples), "--steps", str(given.steps)]
    ranks = []
    try:
        for rank in range(RANKS):
            environment = WorkerEnvironment(
                job_id="checkpointing",
                generation=1,
                mode=Mode.TRAIN,
                rank=rank,
                local_rank=rank,
                world_size=RANKS,
                rendezvous_host="127.0.0.1",
                rendezvous_port=port,
                plan=Plan(
                    p=1, d=RANKS, micro_batch=given.examples // case.micro_batches, global_batch=RANKS * given.examples
                ),
                device=str(_device(rank)),
            )
            # A fixed threshold of malloc keeps every large tensor in pages of its own, which are freed with it.
            environ = {**os.environ, **environment.to_environ(), "MALLOC_MMAP_THRESHOLD_": "65536"}
            ranks.append(subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True))
        found = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    if failed:
        raise RuntimeError(f"{case.name}: rank {failed[0]} ended with {ranks[failed[0]].returncode}")
    return [json.loads(text.splitlines()[-1]) for text in found]


def measure(case: MemoryCase, examples: int, steps: int) -> dict[str, Any]:
    """One rank's work."""
    rank = int(os.environ["RANK"])
    device = _device(rank)
    share = {
        name: tensor[rank * examples : (rank + 1) * examples].to(device)
        for name, tensor in Examples(RANKS * examples).batch(RANKS * examples).items()
    }
    if case.system == "DDP":
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    before = _resident_bytes("VmRSS")
    step, model = (ddp_side if case.system == "DDP" else varuna_side)(case, share, device)
    step()
    digest = hashlib.sha256(_flat_gradients(model).numpy().tobytes()).hexdigest()
    if rank == 0:
        torch.save(_flat_gradients(model), "gradients.pt")
    times_ms, peaks = [], []
    for _ in range(steps):
        _forget_peak(device)
        began_s = time.perf_counter()
        step()
        times_ms.append((time.perf_counter() - began_s) * 1e3)
        peaks.append(torch.cuda.max_memory_allocated() if device.type == "cuda" else _resident_bytes("VmHWM") - before)
    if case.system == "DDP":
        dist.destroy_process_group()
    return {"digest": digest, "peak_bytes": max(peaks), "step_ms": statistics.median(times_ms)}


def build_model(chunks: int) -> Net:
    torch.manual_seed(0)
    return Net(chunks=chunks, blocks=BLOCKS, width=WIDTH, dropout=0.0)


def ddp_side(
    case: MemoryCase, share: dict[str, Tensor], device: torch.device
) -> tuple[Callable[[], object], nn.Module]:
    model = build_model(case.chunks).to(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        parallel(**share).backward()
        optimizer.step()

    return step, model


def varuna_side(
    case: MemoryCase, share: dict[str, Tensor], device: torch.device
) -> tuple[Callable[[], object], nn.Module]:
    model = Varuna(build_model(case.chunks), get_batch_fn=lambda size, device=None: Examples(size).batch(size))
    model.set_optimizer(torch.optim.AdamW(model.parameters()))
    return lambda: model.step(share), model


def _flat_gradients(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return torch.cat([gradient.flatten().cpu() for gradient in gradients if gradient is not None])


def _device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.device_count() >= RANKS else torch.device("cpu")


def _resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: at most since `_forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak back to what is resident now


def table(report: dict[str, Any]) -> Table:
    """`report` for people."""
    shown = Table(
        "",
        "peak MiB",
        "of DDP's",
        "step ms",
        "error",
        title=f"{RANKS} replicas, {report['examples_per_rank']} examples each, {report['parameter_mib']:.0f} MiB of "
        f"parameters, on {report['device']}",
    )
    plain = report["rows"][0]["peak_mib"]
    for row in report["rows"]:
        peak = row["peak_mib"]
        shown.add_row(row["name"], f"{peak:.0f}", f"{peak / plain:.0%}", f"{row['step_ms']:.0f}", f"{row['error']:.0e}")
    return shown


if __name__ == "__main__":
    main()
