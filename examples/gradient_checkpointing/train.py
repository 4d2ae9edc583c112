"""Data-parallel training with activation checkpointing: every rank prints its gradients after each step.

python -m varuna.run_varuna … --nstages 1 --no_arguments train.py --chunks 4
"""

from __future__ import annotations

import argparse
import hashlib

import torch

from model import Examples, Net
from varuna import Varuna, get_varuna_config
from varuna.data import Batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=4, help="runs of blocks that are checkpointed; 0: none")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    examples = Examples()
    model = Varuna(Net(chunks=arguments.chunks), get_batch_fn=lambda size, device=None: examples.batch(size))
    model.set_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    p, d = get_varuna_config()
    for step, batch in Batches(examples, first_step=model.resume() + 1, last_step=arguments.steps):
        loss, _, _ = model.step(batch)
        gradients = hashlib.sha256()
        for parameter in model.parameters():
            gradients.update(parameter.grad.cpu().numpy().tobytes())
        print(f"{p}×{d} step {step} loss {loss:.6f} gradients {gradients.hexdigest()[:12]}", flush=True)


if __name__ == "__main__":
    main()
