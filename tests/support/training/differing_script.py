"""Trains a small GPT where one rank differs from the others: {"task", "out", "odd_rank", "differs": in what}."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from small_gpt import Examples, H, Task, example_batch, make_model
from varuna import Varuna
from varuna.data import Batches


def main() -> None:
    torch.set_num_threads(1)
    wanted = json.loads(Path(sys.argv[1]).read_text())
    differs = wanted["differs"] if int(os.environ["RANK"]) == wanted["odd_rank"] else "nothing"
    plain = make_model(Task(**wanted["task"]))
    if differs == "head":
        plain.head = nn.Linear(H, 31, bias=False)
    if differs == "frozen":
        plain.norm.bias.requires_grad_(False)

    def examples(size: int, device: str = "cpu") -> dict[str, Any]:
        batch = example_batch(size)
        return {name: tensor[:, :-1] for name, tensor in batch.items()} if differs == "length" else batch

    model = Varuna(plain, get_batch_fn=examples)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = Batches(Examples(), global_batch=8, last_step=2 if differs in ("steps", "evaluation") else 4)
    for _, batch in batches:
        model.step(batch)
    if differs != "steps":
        model.evaluate(batch)


if __name__ == "__main__":
    main()
