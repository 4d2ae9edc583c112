"""A training script whose model writes buffers in forward: batch-norm statistics, and a buffer that it computes with.

Its one argument is a JSON file: {"out": folder, "steps": to be done when it ends, "save": whether to end with a
checkpoint, "p": stages, "shares": of each replica, from and to which example}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from training_roles import training_role
from varuna import CutPoint, Varuna

H, BATCH = 4, 10


class Moving(nn.Module):
    """Moves its buffer towards what it sees and multiplies by it, for which backward needs the buffer as it was."""

    centre: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.register_buffer("centre", torch.ones(H))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen += 1
        self.centre.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y * self.centre


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = Moving(), nn.BatchNorm1d(H), Moving()
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cut(self.norm(self.first(x)).tanh())).square().mean()


def examples(step: int) -> Tensor:
    """Those of the global batch."""
    return torch.randn(BATCH, H, generator=torch.Generator().manual_seed(step))


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    model = Varuna(Model(), get_batch_fn={"x": examples(0)}, batch_size=BATCH)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    done = model.resume()
    share = slice(*wanted["shares"][int(os.environ["RANK"]) // wanted["p"]])
    losses = [model.step({"x": examples(step)[share]})[0] for step in range(done + 1, wanted["steps"] + 1)]
    buffers = dict(training_role(model).assembly.stage.buffers)
    evaluated = model.evaluate({"x": examples(0)[share]})
    if wanted["save"]:
        model.checkpoint()
    found = {"losses": losses, "evaluated": evaluated, "buffers": buffers, "parameters": dict(model.named_parameters())}
    torch.save(found, Path(wanted["out"], f"rank{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main()
