"""Pre-train BERT with Varuna: run by every worker, on any number of GPUs, or by hand.

varuna submit examples/bert/tiny-phase1.yaml
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence

import torch

from arguments import parse_arguments, without_effect
from lamb import Lamb, restart_bias_correction
from pretraining_data import PretrainingDataset
from recipe import build_model, build_optimizer, examples, load_dataset, set_rate
from run_log import RunLog
from varuna import Varuna
from varuna.checkpoint import newest_complete
from varuna.data import Batches


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(given, description=__doc__)
    writes = os.environ.get("RANK", "0") == "0"
    log = RunLog(arguments.json_summary if writes else None)
    for line in without_effect(arguments):
        log.parameter("NOTE", line)
    log.parameter("SEED", arguments.seed)
    dataset = load_dataset(arguments)
    model = Varuna(
        build_model(arguments, dataset.vocab_size),
        get_batch_fn=lambda size, device=None: examples(dataset, size),
        fp16=arguments.fp16,
        dtype=torch.bfloat16 if arguments.bf16 else None,
    )
    optimizer = build_optimizer(model.named_parameters(), arguments)
    model.set_optimizer(
        optimizer,
        loss_scale=arguments.loss_scale or "dynamic",
        init_loss_scale=arguments.init_loss_scale,
    )
    start = begin_phase(model, optimizer, arguments)
    train(model, optimizer, dataset, start=start, arguments=arguments, log=log)


def begin_phase(model: Varuna, optimizer: Lamb, arguments: argparse.Namespace) -> int:
    """Loads the newest checkpoint, else the one that the phase begins with. Returns the phase's completed steps.

    Phase 2 begins with the parameters and the moments of phase 1; its learning rate and LAMB's bias correction
    restart. Raises ValueError when there is no checkpoint to begin with.
    """
    done = newest(model, arguments)
    first_store, first = arguments.init_checkpoint or (None, arguments.phase1_end_step)
    if done < first:
        if first_store is None:
            where = model.checkpoint_url or arguments.output_dir
            raise ValueError(
                f"--phase2 goes on from step {first} of phase 1, but the newest checkpoint in {where} is of step "
                f"{done}: finish phase 1 there, or name its last checkpoint with --init_checkpoint"
            )
        model.load_checkpoint(first_store, first)
        done = first
    if first and done == first:
        restart_bias_correction(optimizer)
    return done - first


def newest(model: Varuna, arguments: argparse.Namespace) -> int:
    """Loads the newest checkpoint of this training, if there is one; its step, or 0."""
    if model.checkpoint_url is not None:
        return model.resume()
    if arguments.output_dir is None or not (arguments.resume_from_checkpoint or arguments.phase2):
        return 0
    step = newest_complete(arguments.output_dir)
    if step is None:
        return 0
    model.load_checkpoint(arguments.output_dir, step)
    return step


def train(
    model: Varuna,
    optimizer: Lamb,
    dataset: PretrainingDataset,
    *,
    start: int,
    arguments: argparse.Namespace,
    log: RunLog,
) -> None:
    """Train the steps of this phase after `start`."""
    last = arguments.max_steps
    if arguments.steps_this_run >= 0:
        last = min(last, start + arguments.steps_this_run)
    batches = Batches(
        dataset, global_batch=arguments.train_batch_size, seed=arguments.seed, first_step=start + 1, last_step=last
    )
    began, losses, average = time.monotonic(), [], math.nan
    for step, batch in batches:
        rate = set_rate(optimizer, step, arguments)
        loss, _overflow, _gradient_norm = model.step(batch)
        losses.append(loss)
        if step % arguments.log_freq == 0 or step == last:
            average = sum(losses) / len(losses)
            epoch = (step - 1) * batches.global_batch // len(dataset)
            log.step(epoch, step, {"average_loss": average, "step_loss": loss, "learning_rate": rate})
            losses = []
        every = arguments.num_steps_per_checkpoint
        if every and step % every == 0 and step < last:
            save(model, arguments)
    if start < last:
        save(model, arguments)
        took_s = time.monotonic() - began
        rate = (last - start) * batches.global_batch / took_s
        log.end({"e2e_train_time": took_s, "training_sequences_per_second": rate, "final_loss": average})


def save(model: Varuna, arguments: argparse.Namespace) -> None:
    """Under a manager into the job's store, by hand into --output_dir, if there is one."""
    store = model.checkpoint_url or arguments.output_dir
    if store is not None and not arguments.skip_checkpoint:
        model.checkpoint(store)


if __name__ == "__main__":
    main()
