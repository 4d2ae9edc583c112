"""A training script that drops what it has accumulated. A stage is frozen, and a save is due after the first epoch.

Its one argument is a JSON file: {"out": folder, "drop": how, "offload": bool}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from varuna import CutPoint, Varuna
from varuna.checkpoint.saving.automatic import AutomaticCheckpoints

H, BATCH = 4, 4
EPOCHS = [3, 3, 4]
"""Steps of each: the last of an odd number is dropped, as the next epoch begins."""


class Model(nn.Module):
    """Its front is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.front, self.end = nn.Linear(H, H), nn.Linear(H, H)
        self.cut = CutPoint()
        self.front.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.end(self.cut(self.front(x).tanh())).square().mean()
        return loss


def examples(step: int) -> Tensor:
    return torch.randn(BATCH, H, generator=torch.Generator().manual_seed(step))


def drop_gradients(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "optimizer":
        optimizer.zero_grad()
    elif how == "zeros":
        optimizer.zero_grad(set_to_none=False)
    elif how == "model":
        model.zero_grad()
    else:
        for parameter in model.parameters():
            parameter.grad = None


def is_due_after_epoch(checkpoints: AutomaticCheckpoints, step: int) -> bool:
    return checkpoints._decides and step == EPOCHS[0]


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    AutomaticCheckpoints._is_due = is_due_after_epoch  # type: ignore[assignment,method-assign]
    model = Varuna(
        Model(),
        get_batch_fn={"x": examples(0)},
        batch_size=BATCH,
        accumulate=True,
        offload_optimizer=wanted["offload"],
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model.set_optimizer(optimizer)
    norms = []
    step = 0
    for epoch, length in enumerate(EPOCHS):
        drop_gradients(wanted["drop"], model, optimizer)
        if epoch == 2:
            optimizer.step()  # there is nothing to update from
        for i in range(length):
            step += 1
            norms.append(model.step({"x": examples(step)})[2])
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = {"norms": norms, "parameters": parameters}
    torch.save(found, Path(wanted["out"], f"rank{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main()
