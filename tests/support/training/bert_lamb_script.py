"""What the ranks of `test_bert_lamb.py` run: a small GPT with tied weights, trained by the BERT example's LAMB.

Its one argument is a JSON file: {"task": {...}, "out": folder}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from repository import ROOT
from small_gpt import Examples, Task, example_batch, make_model, states_of
from varuna import Varuna
from varuna.data import Batches

BOUND = 0.5
"""The limit of the global norm: below that of the first gradients, and above that of one stage alone."""


def make_lamb(named: Iterable[tuple[str, nn.Parameter]], task: Task) -> Optimizer:
    """Without weight decay for vectors, as in the recipe."""
    sys.path.insert(0, str(ROOT / "examples" / "bert"))
    try:
        from lamb import Lamb
    finally:
        sys.path.pop(0)
    every = [parameter for _, parameter in named]
    decayed = {"params": [p for p in every if p.dim() > 1], "weight_decay": task.weight_decay}
    rest = {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0}
    return Lamb([decayed, rest], lr=task.learning_rate, max_grad_norm=BOUND)


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    task, out, rank = Task(**wanted["task"]), Path(wanted["out"]), os.environ["RANK"]
    model = Varuna(make_model(task), get_batch_fn=example_batch)
    optimizer = make_lamb(model.named_parameters(), task)
    model.set_optimizer(optimizer)
    steps = []
    for step, batch in Batches(Examples(), last_step=task.steps):
        loss, overflow, norm = model.step(batch)
        steps.append({"step": step, "loss": loss, "norm": norm, "overflow": overflow})
    torch.save(model.state_dict(), out / f"rank{rank}.pt")
    torch.save(states_of(optimizer, model.named_parameters()), out / f"rank{rank}.optimizer.pt")
    (out / f"rank{rank}.json").write_text(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
