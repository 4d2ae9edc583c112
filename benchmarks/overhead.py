"""The cost of Varuna where it has nothing to gain: one rank against plain PyTorch, two replicas against DDP.

Both sides train the example GPT in the same processes, taking turns round by round, on one thread per rank, with the
same micro-batches and the same optimizer. A round's figure is a ratio; the report has the median of all rounds.
Varuna's side computes the global loss and gradient norm in every step, as it always does. `cpu_ratio` is the same of
CPU time, all threads counted: on a machine with other work to do it varies less.

    python benchmarks/overhead.py --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gpt"))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch import distributed as dist  # noqa: E402

from recipe import build_model, build_optimizer, load_dataset  # noqa: E402
from varuna import Varuna  # noqa: E402

Batch = Mapping[str, Tensor]
Step = Callable[[], None]
SAME_LOSS = 1e-4
"""The largest relative difference of the two sides' losses. Beyond it they did not do the same work."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--examples", type=int, default=8, help="examples of one replica's batch")
    parser.add_argument("--chunk", type=int, default=2, help="examples in a micro-batch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.as_rank is not None:
        measure_against_ddp(given)
        return
    report: dict[str, Any] = {
        "plain": measure_against_plain(given),
        "ddp": run_two_ranks(given),
        "threads_per_rank": 1,
        "torch": torch.__version__,
    }
    if given.json:
        print(json.dumps(report, indent=2))
        return
    for name, peer, shape in (("plain", "plain PyTorch", "P=1 D=1"), ("ddp", "DistributedDataParallel", "P=1 D=2")):
        figures = report[name]
        print(
            f"{shape}: Varuna {figures['varuna_ms']:.1f} ms, {peer} {figures['peer_ms']:.1f} ms a step; ratio "
            f"{figures['ratio']:.4f} (quartiles {figures['ratio_quartiles'][0]:.4f} to "
            f"{figures['ratio_quartiles'][1]:.4f} of {figures['rounds']} rounds); CPU {figures['cpu_ratio']:.4f}"
        )


def measure_against_plain(given: argparse.Namespace) -> dict[str, Any]:
    batch = load_dataset().batch(list(range(given.examples)))
    varuna, losses = varuna_side(batch, given.examples, given.chunk)
    plain, plain_losses = plain_side(build_model(), batch, given.chunk, contextlib.nullcontext)
    figures = take_turns(varuna, plain, given)
    assert_same_work(losses, plain_losses)
    return figures


def run_two_ranks(given: argparse.Namespace) -> dict[str, Any]:
    """Runs this file as two ranks; rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        sizes = ["--batch_size", str(2 * given.examples), "--chunk_size", str(given.chunk)]
        launch = ["-m", "varuna.launcher", "--ngpus_per_server", "2", "--nstages", "1", *sizes, "--device", "cpu"]
        own = ["--rounds", str(given.rounds), "--steps", str(given.steps), "--examples", str(given.examples)]
        script = [str(HERE), *own, "--chunk", str(given.chunk), "--as-rank", str(out)]
        command = [sys.executable, *launch, "--master_port", "0", "--no_arguments", *script]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def measure_against_ddp(given: argparse.Namespace) -> None:
    """On each of two ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batch = load_dataset().batch(list(range(rank * given.examples, (rank + 1) * given.examples)))
    varuna, losses = varuna_side(batch, 2 * given.examples, given.chunk)
    replicated = nn.parallel.DistributedDataParallel(build_model())
    ddp, ddp_losses = plain_side(replicated, batch, given.chunk, replicated.no_sync)
    figures = take_turns(varuna, ddp, given, before=dist.barrier)
    mean = torch.tensor(ddp_losses)  # Varuna's losses are of the global batch
    dist.all_reduce(mean)
    assert_same_work(losses, (mean / 2).tolist())
    if rank == 0:
        given.as_rank.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def varuna_side(batch: Batch, global_batch: int, chunk: int) -> tuple[Step, list[float]]:
    """A training step of Varuna, and where the losses go."""
    dataset = load_dataset()
    model = Varuna(
        build_model(),
        get_batch_fn=lambda size, device=None: dataset.batch(list(range(size))),
        batch_size=global_batch,
        chunk_size=chunk,
    )
    model.set_optimizer(build_optimizer(model.parameters()))
    losses: list[float] = []
    return lambda: losses.append(model.step(batch)[0]), losses


def plain_side(
    model: nn.Module, batch: Batch, chunk: int, no_sync: Callable[[], contextlib.AbstractContextManager[None]]
) -> tuple[Step, list[float]]:
    """The same step as one writes it by hand: gradients accumulated over micro-batches, reduced with the last."""
    optimizer = build_optimizer(model.parameters())
    names = list(batch)
    pieces = [
        dict(zip(names, parts, strict=True)) for parts in zip(*(batch[n].split(chunk) for n in names), strict=True)
    ]
    examples = sum(len(piece[names[0]]) for piece in pieces)
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, piece in enumerate(pieces, start=1):
            with no_sync() if number < len(pieces) else contextlib.nullcontext():
                mean, _ = model(**piece)  # of as many tokens in each example
                loss = mean * (len(piece[names[0]]) / examples)
                loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)

    return step, losses


def take_turns(
    varuna: Step, peer: Step, given: argparse.Namespace, before: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Figures of `rounds` rounds; the side that goes first alternates, so that a drift favours neither."""
    sides = {"varuna": varuna, "peer": peer}
    for step in sides.values():  # the first steps allocate
        step()
        step()
    times: dict[str, list[float]] = {"varuna": [], "peer": []}
    cpu: dict[str, list[float]] = {"varuna": [], "peer": []}
    for number in range(given.rounds):
        for name in sides if number % 2 else reversed(sides):
            before()
            started, cpu_started = time.perf_counter(), time.process_time()
            for _ in range(given.steps):
                sides[name]()
            times[name].append((time.perf_counter() - started) / given.steps)
            cpu[name].append((time.process_time() - cpu_started) / given.steps)
    ratios = [own / other for own, other in zip(times["varuna"], times["peer"], strict=True)]
    cpu_ratios = [own / other for own, other in zip(cpu["varuna"], cpu["peer"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "cpu_ratio": statistics.median(cpu_ratios),
        "varuna_ms": 1e3 * statistics.median(times["varuna"]),
        "peer_ms": 1e3 * statistics.median(times["peer"]),
        "rounds": given.rounds,
        "steps_per_round": given.steps,
        "examples_per_replica": given.examples,
        "micro_batch": given.chunk,
    }


def assert_same_work(own: list[float], others: list[float]) -> None:
    assert len(own) == len(others)
    for step, (loss, other) in enumerate(zip(own, others, strict=True), start=1):
        assert abs(loss - other) <= SAME_LOSS * abs(other), f"step {step}: losses {loss} and {other} differ"


if __name__ == "__main__":
    main()
