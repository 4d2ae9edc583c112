"""Models of the zoo trained by all ranks of a job, and by plain PyTorch.

As a script, its one argument is a JSON file: {"rows": [{"model", "dropout", "environ": by rank}], "out": folder}. Each
row is a generation of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from varuna import Varuna
from varuna.data import Batches
from zoo_models import MODELS

GLOBAL_BATCH, MICRO_BATCH, STEPS, CLIP = 8, 2, 5, 0.5


class Examples(torch.utils.data.Dataset):
    """The same in every process."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(5)
        made = [MODELS[name].inputs() for _ in range(8)]
        self._columns = {key: torch.cat([inputs[key] for inputs in made]) for key in made[0]}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: column[index] for key, column in self._columns.items()}

    def first(self, size: int, device: str = "cpu") -> dict[str, Tensor]:
        return {key: column[:size] for key, column in self._columns.items()}


def make_model(name: str, dropout: bool) -> nn.Module:
    torch.manual_seed(7)
    model = MODELS[name].build()
    if not dropout:
        for module in model.modules():
            for attribute in ("attention_dropout", "attn_dropout", "dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(name: str, dropout: bool, out: Path) -> Varuna:
    """As the environment says; what this rank has then is written into `out`."""
    examples = Examples(name)
    model = Varuna(make_model(name, dropout), get_batch_fn=examples.first, batch_size=GLOBAL_BATCH)
    model.set_optimizer(make_optimizer(model.parameters()))
    steps = []
    for step, batch in Batches(examples, global_batch=GLOBAL_BATCH, last_step=STEPS):
        loss, _, norm = model.step(batch, clip_grad_max_norm=CLIP)
        steps.append({"step": step, "loss": loss, "norm": norm})
    rank = os.environ.get("RANK", "0")
    torch.save({key: p.detach() for key, p in model.named_parameters()}, out / f"rank{rank}.pt")
    torch.save({}, out / f"rank{rank}.optimizer.pt")
    (out / f"rank{rank}.json").write_text(json.dumps({"steps": steps}))
    return model


def train_plainly(name: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and parameters: no Varuna, the whole batch at once, without dropout."""
    model = make_model(name, dropout=False)
    optimizer = make_optimizer(model.parameters())
    losses, norms = [], []
    for _, batch in Batches(Examples(name), global_batch=GLOBAL_BATCH, last_step=STEPS, environ={}):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {key: p.detach() for key, p in model.named_parameters()}


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    port = os.environ["MASTER_PORT"]
    models: list[Varuna] = []  # kept: with the first one, the store would go that rank 0 serves to all
    for number, row in enumerate(wanted["rows"]):
        os.environ.update({**row["environ"][rank], "MASTER_PORT": port})
        out = Path(wanted["out"]) / str(number)
        out.mkdir(exist_ok=True)
        models.append(train(row["model"], row["dropout"], out))


if __name__ == "__main__":
    main()
