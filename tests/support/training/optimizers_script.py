"""A training script with optimizers as users write them: a group for each layer, two optimizers, frozen stages.

Its one argument is a JSON file: {"out": folder, "steps": [first, last], "rows": [{"case", "environ": by rank}]}. Each
row is a generation of its own in the same process, as in `training_matrix_script.py`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from varuna import CutPoint, Varuna
from varuna.data import Batches

H, LAYERS, BATCH = 4, 4, 4
CASES = ("layers", "layers named", "pair", "front frozen", "end frozen")

Named = Iterable[tuple[str, nn.Parameter]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(H)
        self.cut_points = [CutPoint() for _ in range(LAYERS - 1)]

    def forward(self, x: Tensor) -> Tensor:
        for layer, cut_point in zip(self.layers, [*self.cut_points, None], strict=True):
            x = layer(x).tanh() + x
            if cut_point is not None:
                x = cut_point(x)
        return self.norm(x).pow(4).mean() + x.pow(2).mean()


class Examples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(H, generator=torch.Generator().manual_seed(index))}


def make_model(case: str) -> Model:
    model = Model()
    frozen = {"front frozen": ("layers.0.", "layers.1."), "end frozen": ("layers.2.", "layers.3.", "norm.")}.get(
        case, ()
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or ("none",)))
    return model


def make_optimizers(case: str, named: Named) -> list[Optimizer]:
    named = list(named)
    if case.startswith("layers"):
        kept: dict[str, list[Any]] = {}
        for name, parameter in named:
            kept.setdefault(name.rpartition(".")[0], []).append((name, parameter) if "named" in case else parameter)
        numbers = {layer: LAYERS if layer == "norm" else int(layer.removeprefix("layers.")) for layer in kept}
        groups = [{"params": held, "lr": 0.002 * 2 ** numbers[layer]} for layer, held in kept.items()]
        return [AdamW(groups)]
    if case == "pair":
        # No matrix of the last two layers is among them, so a stage may have none.
        matrices = [p for name, p in named if p.ndim == 2 and name.startswith(("layers.0.", "layers.1."))]
        others = [p for name, p in named if p.ndim != 2 or not name.startswith(("layers.0.", "layers.1."))]
        return [Muon(matrices, lr=0.02), AdamW(others, lr=0.005)]
    return [AdamW([p for _, p in named if p.requires_grad], lr=0.01)]


def make_schedulers(optimizers: list[Optimizer]) -> list[LRScheduler]:
    return [LambdaLR(optimizer, lambda step: 0.8**step) for optimizer in optimizers]


def options_of(named: Named, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> dict[str, list[float]]:
    """For each parameter that is trained: its learning rate, and what its scheduler has for it."""
    names = {id(parameter): name for name, parameter in named}
    return {
        names[id(parameter)]: [float(group["lr"]), float(base), float(last)]
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True)
        for group, base, last in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.get_last_lr(), strict=True)
        for parameter in group["params"]
        if id(parameter) in names
    }


def train(case: str, first: int, last: int, out: Path) -> Varuna:
    model = Varuna(make_model(case), get_batch_fn={"x": torch.zeros(2, H)}, batch_size=BATCH)
    optimizers = make_optimizers(case, model.named_parameters())
    schedulers = make_schedulers(optimizers)
    model.set_optimizer(optimizers if len(optimizers) > 1 else optimizers[0])
    for number, scheduler in enumerate(schedulers):
        model.register_state(f"scheduler {number}", scheduler)
    assert model.resume() == first - 1
    losses, norms = [], []
    for _, batch in Batches(Examples(), global_batch=BATCH, first_step=first, last_step=last):
        loss, _, norm = model.step(batch, clip_grad_max_norm=0.5)
        losses.append(loss)
        norms.append(norm)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()  # as scripts do, and left out
            optimizer.zero_grad()
            scheduler.step()
    assert model.checkpoint()
    options = options_of(model.named_parameters(), optimizers, schedulers)
    found = {"losses": losses, "norms": norms, "options": options, "parameters": dict(model.named_parameters())}
    torch.save(found, out / f"{case}.rank{os.environ['RANK']}.pt")
    return model


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    port = os.environ["MASTER_PORT"]
    models: list[Varuna] = []  # kept: with the first one, the store would go that rank 0 serves to all
    for row in wanted["rows"]:
        os.environ.update({**row["environ"][rank], "MASTER_PORT": port})
        first, last = wanted["steps"]
        models.append(train(row["case"], first, last, Path(wanted["out"])))


if __name__ == "__main__":
    main()
