"""Train the GPT with Varuna: run by every worker, whatever the number of GPUs is just now.

varuna submit examples/gpt/job.yaml
"""

from __future__ import annotations

import argparse

from recipe import SEED, build_model, build_optimizer, load_dataset
from varuna import Varuna
from varuna.data import Batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="steps to train in all, over all restarts")
    parser.add_argument("--global-batch", type=int, help="to run it by hand, without a job that says so")
    arguments = parser.parse_args()

    dataset = load_dataset()
    model = Varuna(build_model(), get_batch_fn=lambda size, device=None: dataset.batch(list(range(size))))
    model.set_optimizer(build_optimizer(model.parameters()))
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
