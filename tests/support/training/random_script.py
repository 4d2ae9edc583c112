"""Trains a model that draws random numbers in many ways, and writes the losses of this rank: of each step, and of two
evaluations after it.

Its one argument is a JSON file: {"task": {"global_batch", "steps", ...}, "out": folder, "save": {"step", "url"}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from random_models import Mixed, T, batch
from varuna import Varuna
from varuna.data import Batches


class Examples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": batch(index + 1)["x"][index]}


class Noisy(Mixed):
    """Draws for its examples in each block, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.embedding(x)) + 0.1 * torch.rand(T, 1, device=x.device)
        for block in self.blocks:
            y = block(y)
            y = y + 0.1 * torch.randn_like(y)
        return F.mse_loss(self.head(y), x)


def train(global_batch: int, steps: int, saves: dict[str, Any] | None = None, **options: Any) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Varuna(Noisy(), get_batch_fn=batch, **options)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    first, losses = model.resume() + 1, []
    for step, examples in Batches(Examples(), global_batch=global_batch, first_step=first, last_step=steps):
        losses += [model.step(examples)[0], model.evaluate(examples), model.evaluate(examples)]
        if saves is not None and saves["step"] == step:
            assert model.checkpoint(saves["url"])
    return losses


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[1]).read_text())
    task = wanted["task"]
    losses = train(task["global_batch"], task["steps"], wanted.get("save"))
    (Path(wanted["out"]) / f"losses{os.environ['RANK']}.json").write_text(json.dumps(losses))
