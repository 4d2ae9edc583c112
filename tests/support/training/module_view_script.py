"""A training script that treats its model as a module: hooks, changes between steps, state dicts, `apply`.

Its one argument is a JSON file: {"out": folder, "p": stages, "shares": of each replica, from and to which example,
"offload": bool, "steps": from and to which}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna import CutPoint, Varuna

H, BATCH = 4, 8


class Model(nn.Module):
    """Tied over both stages, with a parameter of its own, batch-norm statistics, and hooks on gradients."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.factor = 1.0
        self.shift = nn.Parameter(torch.randn(H))
        self.first, self.norm = nn.Linear(H, H), nn.LayerNorm(H)
        self.middle, self.last = nn.Linear(H, H), nn.Linear(H, H, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((H,), 0.5))
        self.register_buffer("unread", torch.tensor([True, False, True]))
        self.cut = CutPoint()
        self.first.weight.register_hook(lambda gradient: gradient * torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.middle.bias.register_hook(lambda gradient: gradient * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(self.norm(self.first(x + self.shift)).tanh())
        return (self.last(self.middle(x) * self.scale) * self.factor).square().mean()


def examples(step: int) -> Tensor:
    """Those of the global batch."""
    return torch.randn(BATCH, H, generator=torch.Generator().manual_seed(step))


def change(model: Any, step: int) -> None:
    """What the script does after a step, to plain PyTorch's model and to Varuna's."""
    if step == 1:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.4, 0.4)
    elif step == 2:
        model.middle.weight.data.mul_(0.5)
        model.first.weight.data[0] = 0.25  # tied over the stages
        model.shift.data.zero_()
        model.scale.add_(0.5)
    elif step == 3:
        model.load_state_dict(Model(seed=2).state_dict())
    elif step == 4:
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        model.factor = 0.5
    elif step == 5:
        model.apply(lambda module: nn.init.constant_(module.weight, 0.3) if isinstance(module, nn.Linear) else None)


def draw_anew(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    model = Varuna(Model(), get_batch_fn={"x": examples(0)}, batch_size=BATCH, offload_optimizer=wanted["offload"])
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    done = model.resume()
    first, last = wanted["steps"]
    assert done == first - 1
    share = slice(*wanted["shares"][rank // wanted["p"]])
    losses = []
    for step in range(first, last + 1):
        losses.append(model.step({"x": examples(step)[share]})[0])
        change(model, step)
    model.checkpoint()
    evaluated = model.evaluate({"x": examples(0)[share]})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    whole = model.full_state_dict()
    modules = [name for name, _ in model.named_modules()]
    torch.manual_seed(rank)  # as a script's own augmentations do
    model.apply(draw_anew)
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    found = {
        "losses": losses,
        "evaluated": evaluated,
        "state": state,
        "drawn": drawn,
        "modules": modules,
        "whole": whole,
    }
    torch.save(found, Path(wanted["out"], f"rank{rank}.pt"))
    model.step({"x": examples(0)[share]})


if __name__ == "__main__":
    main()
