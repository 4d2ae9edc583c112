"""The training of `recovery.py`: equal Linear layers and AdamW. Each worker writes a line for each step that it ends.

The parameters are made on `meta`: no process ever has the whole model, and a restart makes only the parameters of its
stage.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from _recovery_model import Activity, Layers, Noise, open_to_append

from varuna import Varuna
from varuna.data import Batches

_POLL_S = 0.005
_EVALUATIONS = 4
"""After each step, where evaluations are wanted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--example-ms", type=float, required=True, help="forward of one example through one layer")
    parser.add_argument(
        "--copy-batches", action="store_true", help="give step() copies of its batches, with which no worker stays"
    )
    parser.add_argument("--record", type=Path, required=True, help="file to which all workers append PID STEP TIME")
    parser.add_argument("--activity", type=Path, required=True, help="file to which all append when layers waited")
    parser.add_argument("--allowed", type=Path, help="file with the newest step that may be made; default: all")
    parser.add_argument("--steps", type=int, help="the last step; default: none is the last")
    parser.add_argument(
        "--checkpoint-every", type=int, help="steps between checkpoints of the script's own; default: none"
    )
    parser.add_argument(
        "--evaluations", type=Path, help="file to which all append PID STEP LOSS for each evaluation; default: none"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("meta"):
        plain = Layers(given.width, given.layers, given.example_ms / 1e3, Activity(given.activity))
    model = Varuna(plain, get_batch_fn=lambda size, device=None: {"x": torch.ones(size, given.width)})
    model.set_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    record = open_to_append(given.record)
    evaluations = open_to_append(given.evaluations) if given.evaluations else None
    batches = Batches(Noise(given.width), first_step=model.resume() + 1, last_step=given.steps)
    for step, batch in batches:
        while given.allowed and int(given.allowed.read_text()) < step:
            time.sleep(_POLL_S)
        model.step({**batch} if given.copy_batches else batch)
        os.write(record, f"{os.getpid()} {step} {time.time():.6f}\n".encode())
        if given.checkpoint_every and step % given.checkpoint_every == 0:
            model.checkpoint(step=step)
        if evaluations is not None:
            for _, validation in Batches(Noise(given.width), seed=1, last_step=_EVALUATIONS):
                loss = model.evaluate(validation)
                os.write(evaluations, f"{os.getpid()} {step} {loss!r}\n".encode())


if __name__ == "__main__":
    main()
