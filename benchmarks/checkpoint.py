"""What checkpoints cost: training's time with one every 5 steps against none, and GB/s of saving and loading.

The first part trains the example GPT on one rank, in turns of 5 steps that begin with a checkpoint in the background,
or not. The second saves and loads the same state (parameters and Adam's two moments) with Varuna, with torch.save and
with torch.distributed.checkpoint, in turns. Varuna's files carry CRC-32 sums, which are made and verified in these
times; torch.save makes them too, DCP none. DCP's files are synced to the disk, as is its default. The figures
are medians, with the CPU time, which is more reliable than the clock when other programs run.

    python benchmarks/checkpoint.py --json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "examples" / "gpt"))

import structlog  # noqa: E402
import torch  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402

from recipe import build_model, build_optimizer, load_dataset  # noqa: E402
from varuna import Varuna  # noqa: E402
from varuna.checkpoint import CheckpointWriter, ShapePosition, TrainingState, load_checkpoint  # noqa: E402
from varuna.roles.training import TrainingRole  # noqa: E402

STEPS_BETWEEN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of 5 steps with, and without, a checkpoint")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state that is saved and loaded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        report: dict[str, Any] = {
            "training": measure_training(given, Path(folder) / "training"),
            "throughput": measure_throughput(given, Path(folder) / "throughput"),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
    if given.json:
        print(json.dumps(report, indent=2))
        return
    training, throughput = report["training"], report["throughput"]
    print(
        f"{STEPS_BETWEEN} steps with a checkpoint of {training['checkpoint_bytes'] / 1e6:.0f} MB take "
        f"{training['ratio']:.4f} of the time without (quartiles {training['ratio_quartiles'][0]:.4f} to "
        f"{training['ratio_quartiles'][1]:.4f}); stalled {training['stall_ms']:.2f} ms, "
        f"{100 * training['stall_share']:.2f} % of the time; written in {training['write_ms']:.0f} ms behind its back"
    )
    print(f"a state of {throughput['bytes'] / 1e6:.0f} MB:   save GB/s (CPU s/GB)   load GB/s (CPU s/GB)")
    for name, figures in throughput["systems"].items():
        stall = f"   (training waits {1e3 * figures['stall_s']:.0f} ms)" if "stall_s" in figures else ""
        print(
            f"  {name:12}          {figures['save_gb_per_s']:9.2f} ({figures['save_cpu_s_per_gb']:.2f})"
            f"         {figures['load_gb_per_s']:11.2f} ({figures['load_cpu_s_per_gb']:.2f}){stall}"
        )


def measure_training(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dataset = load_dataset()
    batch = dataset.batch(list(range(given.examples)))
    model = Varuna(
        build_model(),
        get_batch_fn=lambda size, device=None: dataset.batch(list(range(size))),
        batch_size=given.examples,
        chunk_size=given.chunk,
    )
    model.set_optimizer(build_optimizer(model.parameters()))
    saved = 0

    def turn(with_checkpoint: bool) -> tuple[float, float]:
        """Seconds of 5 steps, and of them in `checkpoint`."""
        nonlocal saved
        started = time.perf_counter()
        if with_checkpoint:
            saved += 1
            model.checkpoint(str(folder), step=saved, tmpdir=str(folder))
        stalled = time.perf_counter() - started
        for _ in range(STEPS_BETWEEN):
            model.step(batch)
        return time.perf_counter() - started, stalled

    checkpointer = cast(TrainingRole, model._role).checkpoints.checkpointing._open_writer(str(folder))
    turn(True)  # the first allocates
    ratios, stalls, shares, writes = [], [], [], []
    for number in range(given.rounds):
        seconds = {}
        for with_checkpoint in (True, False) if number % 2 else (False, True):
            checkpointer.wait()  # whatever is written then counts for the turn that began it
            seconds[with_checkpoint], stalled = turn(with_checkpoint)
            if with_checkpoint:
                outcome = checkpointer.wait()
                assert outcome is not None, "the save has an outcome"
                assert outcome.result == "committed", outcome.error
                stalls.append(stalled)
                shares.append(stalled / seconds[True])
                writes.append(outcome.write_s)
        ratios.append(seconds[True] / seconds[False])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "stall_ms": 1e3 * statistics.median(stalls),
        "stall_share": statistics.median(shares),
        "write_ms": 1e3 * statistics.median(writes),
        "checkpoint_bytes": outcome.bytes,
        "rounds": given.rounds,
        "steps_between": STEPS_BETWEEN,
    }


def measure_throughput(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """GB/s of each system, and for Varuna what training waits."""
    model, optimizer = make_state(given.megabytes)
    size = sum(p.nbytes + sum(v.nbytes for v in optimizer.state[p].values()) for p in model.parameters())
    systems: dict[str, tuple[Callable[[], float | None], Callable[[], None]]] = {
        "varuna": varuna_system(model, optimizer, folder / "varuna"),
        "torch.save": torch_system(model, optimizer, folder / "torch"),
        "dcp": dcp_system(model, optimizer, folder / "dcp"),
    }
    kinds = ("save", "load", "stall", "save_cpu", "load_cpu")
    times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in systems}
    for number in range(given.repeats + 1):  # the first is for warming up
        for name, (save, restore) in systems.items():
            shutil.rmtree(folder, ignore_errors=True)
            for part in systems:
                (folder / part.removesuffix(".save")).mkdir(parents=True)
            stall, *saving = timed(save)
            _, *loading = timed(restore)
            if number > 0:
                for kind, took in zip(("save", "save_cpu", "load", "load_cpu"), (*saving, *loading), strict=True):
                    times[name][kind].append(took)
                times[name]["stall"] += [] if stall is None else [stall]
    return {
        "bytes": size,
        "repeats": given.repeats,
        "systems": {
            name: {
                "save_gb_per_s": size / 1e9 / statistics.median(taken["save"]),
                "load_gb_per_s": size / 1e9 / statistics.median(taken["load"]),
                "save_cpu_s_per_gb": statistics.median(taken["save_cpu"]) / (size / 1e9),
                "load_cpu_s_per_gb": statistics.median(taken["load_cpu"]) / (size / 1e9),
                **({"stall_s": statistics.median(taken["stall"])} if taken["stall"] else {}),
            }
            for name, taken in times.items()
        },
    }


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, its seconds, and the CPU seconds of all threads meanwhile."""
    started, started_cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - started, time.process_time() - started_cpu


def make_state(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Eight layers, with their Adam moments."""
    width = max(8, int((megabytes * 1e6 / (8 * 3 * 4)) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def varuna_system(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> tuple[Callable[[], float | None], Callable[[], None]]:
    parameters = dict(model.named_parameters())
    state = TrainingState(
        sections=range(len(parameters)),
        section_count=len(parameters),
        parameters=parameters,
        section_of={name: index for index, name in enumerate(parameters)},
        optimizers=(optimizer,),
    )
    checkpointer = CheckpointWriter(str(folder), generation=1, position=ShapePosition(rank=0, p=1, d=1))

    def save() -> float | None:
        assert checkpointer.start_save(1, state), "nothing else is being saved"
        outcome = checkpointer.wait()
        assert outcome is not None, "the save has an outcome"
        assert outcome.result == "committed", outcome.error
        return checkpointer.last_stall_s

    return save, lambda: (load_checkpoint(str(folder), 1, state), None)[1]


def torch_system(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> tuple[Callable[[], float | None], Callable[[], None]]:
    def save() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")

    def restore() -> None:
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, restore


def dcp_system(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> tuple[Callable[[], float | None], Callable[[], None]]:
    assert not dist.is_initialized(), "this process is alone"

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def save() -> None:
        with quiet():
            dcp.save(state(), checkpoint_id=str(folder))

    def restore() -> None:
        into = state()
        with quiet():
            dcp.load(into, checkpoint_id=str(folder))
        model.load_state_dict(into["model"])
        optimizer.load_state_dict(into["optimizer"])

    return save, restore


def quiet() -> warnings.catch_warnings[None]:
    """DCP warns that there is no process group, which is so."""
    return warnings.catch_warnings(action="ignore")


if __name__ == "__main__":
    main()
