"""Train the GPT with Varuna: run by every worker, on any number of GPUs.

varuna submit examples/gpt/job.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from recipe import CONFIGS, LEARNING_RATE, SEED, build_model, build_optimizer, load_dataset
from varuna import Varuna
from varuna.data import Batches

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="steps to train in all, over all restarts")
    parser.add_argument("--global-batch", type=int, help="global batch without a job: by hand, under torchrun or srun")
    parser.add_argument("--config", choices=CONFIGS, default="tiny", help="size of the model: %(choices)s")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="what to train on: uint16 token numbers, no header")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the matrix products: %(choices)s")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--offload-optimizer", action="store_true", help="keep the optimizer in host memory")
    arguments = parser.parse_args()

    config = CONFIGS[arguments.config]
    dataset = load_dataset(config, arguments.tokens)
    model = Varuna(
        build_model(config),
        get_batch_fn=lambda size, device=None: dataset.batch(list(range(size))),
        batch_size=arguments.global_batch,
        stages="auto",  # of the job's plan; under torchrun and srun of one that is made for the processes there
        dtype=DTYPES[arguments.dtype],
        offload_optimizer=arguments.offload_optimizer,
    )
    model.set_optimizer(build_optimizer(model.parameters(), arguments.learning_rate))
    start = model.resume()  # steps already done by earlier generations; 0 at first

    for step, batch in Batches(
        dataset, global_batch=arguments.global_batch, seed=SEED, first_step=start + 1, last_step=arguments.steps
    ):
        loss, _overflow, _gradient_norm = model.step(batch)
        print(f"step {step} loss {loss:.6f}", flush=True)
    if model.checkpoint_url:  # not when run by hand, in a plain process
        model.checkpoint()


if __name__ == "__main__":
    main()
