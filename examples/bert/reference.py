"""The training of train.py's job files in one process of plain PyTorch, which the distributed run must reproduce.

It uses only one part of Varuna: the rule that assigns examples to steps. Writes the loss of every step as JSON.

    python examples/bert/reference.py examples/bert/tiny-phase1.yaml examples/bert/tiny-phase2.yaml --out losses.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from torch.utils.data import default_collate

from arguments import parse_arguments
from lamb import Lamb, restart_bias_correction
from model import BertPretraining
from recipe import build_model, build_optimizer, load_dataset, set_rate
from varuna.data import replica_indices


def phase_of(job: Path) -> argparse.Namespace:
    """The arguments of train.py in a job file, whose global batch becomes --train_batch_size."""
    document = yaml.safe_load(job.read_text())
    words = shlex.split(document["run"])
    phase = parse_arguments(words[words.index("train.py") + 1 :])
    phase.train_batch_size = document["global_batch"]
    # As in the job, paths count from the file's folder.
    phase.input_dir, phase.config_file = job.parent / phase.input_dir, job.parent / phase.config_file
    return phase


def train(phases: Sequence[argparse.Namespace]) -> tuple[BertPretraining, list[float]]:
    """The trained model, and the loss of each step of an uninterrupted run, one phase after the other."""
    model = build_model(phases[0], load_dataset(phases[0]).vocab_size)
    optimizer = build_optimizer(model.named_parameters(), phases[0])
    losses: list[float] = []
    for number, phase in enumerate(phases):
        if number:
            restart_bias_correction(optimizer)
        model.max_predictions = phase.max_predictions_per_seq
        losses.extend(train_phase(model, optimizer, phase))
    return model, losses


def train_phase(model: BertPretraining, optimizer: Lamb, phase: argparse.Namespace) -> list[float]:
    """The loss of each of its steps."""
    dataset = load_dataset(phase)
    losses = []
    for step in range(1, phase.max_steps + 1):
        indices = replica_indices(
            step,
            dataset_size=len(dataset),
            global_batch=phase.train_batch_size,
            micro_batch=phase.train_batch_size,
            replica=0,
            replicas=1,
            seed=phase.seed,
        )
        set_rate(optimizer, step, phase)
        optimizer.zero_grad()
        loss = model(**default_collate([dataset[index] for index in indices]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % phase.log_freq == 0:
            sys.stderr.write(f"step {step} loss {losses[-1]:.4f}\n")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path, nargs="+", help="job files of phase 1 and, with it, of phase 2")
    parser.add_argument("--out", type=Path, help="file for the losses; without it they are printed")
    arguments = parser.parse_args()
    _, losses = train([phase_of(job) for job in arguments.jobs])
    text = json.dumps({"losses": losses})
    if arguments.out is None:
        sys.stdout.write(text + os.linesep)
    else:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
