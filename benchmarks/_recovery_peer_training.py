"""The training of `recovery.py` without Varuna, data parallel: one worker of a torchrun job, or of a torchft job.

All write the same records as Varuna's workers. Under torchrun, rank 0 saves after each step, so that a restart loses
only the step under way. Under torchft each worker is a replica group of its own. One whose step is not committed runs
the same batch again, and writes it to the file of discarded steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _recovery_model import Activity, Layers, Noise, open_to_append
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=["torchrun", "torchft"], required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--example-ms", type=float, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the records, and of torchrun's saves")
    parser.add_argument("--replica", type=int, default=0, help="torchft: this worker's number")
    parser.add_argument("--replicas", type=int, default=0, help="torchft: of how many at the start")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("meta"):
        plain = Layers(given.width, given.layers, given.example_ms / 1e3, Activity(given.folder / "activity"))
    plain.to_empty(device="cpu")
    (train_with_torchrun if given.peer == "torchrun" else train_with_torchft)(given, plain)


def train_with_torchrun(given: argparse.Namespace, plain: Layers) -> None:
    dist.init_process_group("gloo")
    rank, world, step, saved = dist.get_rank(), dist.get_world_size(), 0, given.folder / "saved.pt"
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    if saved.exists():
        state = torch.load(saved, mmap=True)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    else:
        initialize(plain)
    model = DistributedDataParallel(plain)
    record = open_to_append(given.folder / "record")
    while True:
        step += 1
        optimizer.zero_grad()
        run_share(model, model.no_sync, given, step, rank=rank, world=world)
        optimizer.step()
        write_step(record, step)
        if rank == 0:
            part = saved.with_suffix(".part")
            torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
            part.rename(saved)


def train_with_torchft(given: argparse.Namespace, plain: Layers) -> None:
    torchft: Any = importlib.import_module("torchft")  # need not be installed where this file is checked
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    initialize(plain)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-4)

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": adamw.state_dict()},
        min_replica_size=1,
        replica_id=f"vm_{given.replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=60),
    )
    optimizer = torchft.Optimizer(manager, adamw)
    record, discarded = (open_to_append(given.folder / name) for name in ("record", "discarded"))
    while True:
        step = manager.current_step() + 1
        optimizer.zero_grad()
        # Its share stays the one that it had at the start, so with fewer replicas the global batch is smaller.
        run_share(plain, contextlib.nullcontext, given, step, rank=given.replica, world=given.replicas)
        # Not torchft's DistributedDataParallel: where the wait for a sum raises, which gloo's does after the loss of a
        # peer, its hook asserts that there is a future, and the survivor ends (torchft 0.2.0, on the CPU).
        sums = [manager.allreduce(parameter.grad) for parameter in plain.parameters()]
        for one in sums:
            one.wait()
        optimizer.step()
        write_step(record if manager.current_step() >= step else discarded, step)


def initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def run_share(
    model: nn.Module,
    no_sync: Callable[[], contextlib.AbstractContextManager[None]],
    given: argparse.Namespace,
    step: int,
    *,
    rank: int,
    world: int,
) -> None:
    """Forward and backward of this worker's micro-batches of a step; gradients are reduced with the last."""
    data = Noise(given.width)
    starts = range((step - 1) * given.global_batch, step * given.global_batch, given.micro_batch)
    share = starts[rank::world]
    for number, start in enumerate(share, start=1):
        batch = torch.stack([data[index % len(data)]["x"] for index in range(start, start + given.micro_batch)])
        with no_sync() if number < len(share) else contextlib.nullcontext():
            loss = model(batch) * (world / len(starts))  # reducing takes the mean of the workers' sums
            loss.backward()


def write_step(record: int, step: int) -> None:
    os.write(record, f"{os.getpid()} {step} {time.time():.6f}\n".encode())


if __name__ == "__main__":
    main()
