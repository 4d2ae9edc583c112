"""The same training as train.py in one process of plain PyTorch: what the distributed run must reproduce.

It uses only one part of Varuna: the rule that assigns samples to steps. Writes the loss of every step as JSON.

    python examples/gpt/reference.py --steps 120 --global-batch 14 --out losses.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from recipe import SEED, build_model, build_optimizer, load_dataset
from varuna.data import replica_indices


def train(steps: int, global_batch: int) -> list[float]:
    """The loss of each step of an uninterrupted run."""
    dataset = load_dataset()
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    losses = []
    for step in range(1, steps + 1):
        indices = replica_indices(
            step,
            dataset_size=len(dataset),
            global_batch=global_batch,
            micro_batch=global_batch,
            replica=0,
            replicas=1,
            seed=SEED,
        )
        optimizer.zero_grad()
        loss, _ = model(**dataset.batch(indices))  # of the whole batch at once: it needs no weight
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--global-batch", type=int, default=10)
    parser.add_argument("--out", type=Path, help="file for the losses; without it they are printed")
    arguments = parser.parse_args()
    text = json.dumps({"losses": train(arguments.steps, arguments.global_batch)})
    if arguments.out is None:
        sys.stdout.write(text + "\n")
    else:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
