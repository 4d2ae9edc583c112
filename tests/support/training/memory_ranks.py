"""Rank of a job whose memory is measured: blocks of equal size.

Its job says the type to compute in, the optimizer's options, the steps (default: three), a pause after each from the
third on, and whether the blocks are wide: what passes between them takes more memory than all else.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna import CutPoint, Varuna
from varuna.data import Batches

WIDTH, TOKENS, BLOCKS, BATCH = 128, 32, 8, 16
WIDE_TOKENS = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class WideBlock(nn.Module):
    """Keeps nothing for its backward but what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Blocks(nn.Module):
    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock() if wide else Block() for _ in range(BLOCKS))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(BLOCKS - 1))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = self.cuts[number](x) if number < BLOCKS - 1 else x
        return x.square().mean()


def make_get_batch(*, wide: bool = False) -> Callable[..., dict[str, Tensor]]:
    tokens = WIDE_TOKENS if wide else TOKENS

    def get_batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
        return {"x": torch.ones(size, tokens, WIDTH)}

    return get_batch


def make_optimizer(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    wide, dtype = job.get("wide", False), getattr(torch, job["dtype"])
    get_batch = make_get_batch(wide=wide)
    model = Varuna(Blocks(wide=wide), get_batch_fn=get_batch, batch_size=BATCH, dtype=dtype)
    model.set_optimizer(make_optimizer(model, job["optimizer"]))
    data = [{"x": get_batch(1)["x"][0]}] * BATCH
    for step, batch in Batches(data, first_step=1, last_step=job.get("steps", 3)):
        model.step(batch, clip_grad_max_norm=job["clip"])
        if step > 2:
            time.sleep(job.get("pause_s", 0.0))


if __name__ == "__main__":
    main()
