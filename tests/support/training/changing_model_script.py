"""A training script that changes its model between steps: modes, and which parameters train, each once.

Its one argument is a JSON file: {"out": folder, "steps": to be done when it ends, "p": stages, "shares": of each
replica, from and to which example, "through": "varuna" or "users", whose handle the script changes, "offload": bool}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from training_roles import training_role
from varuna import CutPoint, Varuna

H, BATCH, STEPS = 4, 10, 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias: batch norm leaves its gradient nothing but noise, which Adam would train on.
        self.linear, self.norm = nn.Linear(H, H, bias=False), nn.BatchNorm1d(H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x)).tanh()
        return x * 2 if self.training else x


class Model(nn.Module):
    """As a user may have it at wrapping: in evaluation mode, its first half frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = Block(), Block()
        self.cut = CutPoint()
        self.first.requires_grad_(False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.cut(self.first(x))) - x.roll(1, 1)).square().mean()


def change(step: int, model: nn.Module, train: Callable[[], object], modules: nn.Module) -> None:
    """Changes the model before `step`, once each, like a script that counts steps and not epochs.

    `model` has the parameters by name, of a stage or of all; `modules` the modules.
    """

    def set_trains(start: str, trains: bool) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(start):
                parameter.requires_grad_(trains)

    if step in (1, 8):
        train()
    if step == 3:
        set_trains("first.", True)
    if step == 5:
        set_trains("last.linear", False)
    if step == 6:
        modules.get_submodule("first.norm").eval()
    if step == 9:
        set_trains("first.norm", False)
        set_trains("last.linear", True)


def examples(step: int) -> Tensor:
    """Those of the global batch."""
    return torch.randn(BATCH, H, generator=torch.Generator().manual_seed(step))


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    plain = Model()
    model = Varuna(plain, get_batch_fn={"x": examples(0)}, batch_size=BATCH, offload_optimizer=wanted["offload"])
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    done = model.resume()
    share = slice(*wanted["shares"][int(os.environ["RANK"]) // wanted["p"]])
    handle = plain if wanted["through"] == "users" else model
    losses = []
    for step in range(done + 1, wanted["steps"] + 1):
        change(step, handle, handle.train, plain)
        losses.append(model.step({"x": examples(step)[share]}, clip_grad_max_norm=1.0)[0])
        assert model.evaluate({"x": examples(step)[share]}) > 0
    shown = {name: p.requires_grad for name, p in plain.named_parameters()}
    buffers = dict(training_role(model).assembly.stage.buffers)
    model.checkpoint()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = {"losses": losses, "buffers": buffers, "parameters": parameters, "shown": shown}
    torch.save(found, Path(wanted["out"], f"rank{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main()
