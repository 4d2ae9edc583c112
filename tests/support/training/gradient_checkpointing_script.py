"""The script of test_gradient_checkpointing.py: one step for each way of checkpointing, with parameters that stay.

Its one argument is a JSON file with the folder `out` and the list `ways`; writes each step's gradients there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from varuna import Varuna
from varuna.data import Batches

BLOCKS, WIDTH = 6, 8
GLOBAL_BATCH, SEED = 7, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), Net.dropout)


class Net(nn.Module):
    """Its first and last layer are one, so that checkpointed parts begin and end beside tied weights."""

    way = "plain"
    dropout = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kind, _, chunks = Net.way.partition(" ")
        h = self.enter(x)
        if kind == "plain":
            h = self.blocks(h)
        elif kind == "each":
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
        else:
            h = checkpoint_sequential(self.blocks, int(chunks), h, use_reentrant=kind == "reentrant")
        return F.mse_loss(self.leave(h), y)


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def examples() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [{name: torch.randn(WIDTH, generator=random) for name in ("x", "y")} for _ in range(40)]


def example_batch(size: int, device: object = None) -> dict[str, Tensor]:
    return torch.utils.data.default_collate(examples()[:size])


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    model = Varuna(make_model(), get_batch_fn=example_batch)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    found = []
    for (_, batch), way in zip(Batches(examples(), seed=SEED), job["ways"], strict=False):
        Net.way, Net.dropout = way, 0.0 if way.endswith("without dropout") else 0.3
        Net.way = way.removesuffix(" without dropout")
        model.step(batch)
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    torch.save(found, Path(job["out"]) / f"gradients{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
