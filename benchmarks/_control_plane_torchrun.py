"""The example's training under torchrun, plain DDP: what `recovery` compares with.

Rank 0 saves after every step and writes "STEP TIME PIDS" lines to the file that is its argument.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))

from recipe import build_model, build_optimizer, load_dataset  # noqa: E402 - the example is no package

GLOBAL_BATCH = 10


def main() -> None:
    record, saved = Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".pt")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pids: list[int | None] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    dataset, plain = load_dataset(), build_model()
    optimizer, step = build_optimizer(plain.parameters()), 0
    if saved.exists():
        state = torch.load(saved)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DistributedDataParallel(plain)
    while True:
        step += 1
        batch = dataset.batch([(step * GLOBAL_BATCH + i) % len(dataset) for i in range(rank, GLOBAL_BATCH, world)])
        loss, _ = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save(
                {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.part"
            )
            Path(f"{saved}.part").rename(saved)
            with record.open("a") as file:
                file.write(f"{step} {time.time()} {' '.join(map(str, pids))}\n")


if __name__ == "__main__":
    main()
