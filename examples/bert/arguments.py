"""The command line of NVIDIA's `run_pretraining.py`, as train.py and reference.py understand it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

DONE_BY_VARUNA = {
    "gradient_accumulation_steps": "Varuna cuts the batch into micro-batches as the GPUs have room",
    "allreduce_post_accumulation": "Varuna sums gradients once for each step",
    "allreduce_post_accumulation_fp16": "Varuna sums gradients once for each step, in fp32",
    "checkpoint_activations": "Varuna recomputes activations where memory needs it",
    "bert_model": "--config_file describes the model",
    "do_train": "this script does nothing else",
    "disable_progress_bar": "there is none",
    "varuna": "this script always trains with it",
}
"""Arguments of the recipe (and of the seeds' patch to it) that change nothing here, and why."""

FROM_LAUNCHER = ("rank", "local_rank", "stage_to_rank_map", "chunk_size", "batch-size", "resume_step")
"""Arguments that Varuna's launcher passes to scripts; the worker's environment holds the same values."""


def parse_arguments(arguments: Sequence[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Exits with a usage message (exit code 2) when arguments contradict each other."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _add_what_is_trained(parser)
    _add_how_long(parser)
    _add_what_is_written(parser)
    _add_without_effect(parser)
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.warmup_proportion < 1:
        parser.error(f"--warmup_proportion {parsed.warmup_proportion}: it must be at least 0 and below 1")
    for name in ("max_steps", "log_freq", "max_seq_length", "max_predictions_per_seq"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} {getattr(parsed, name)}: it must be at least 1")
    if parsed.phase2 and parsed.init_checkpoint is None and parsed.phase1_end_step < 1:
        parser.error("--phase2 goes on from phase 1: pass the number of its steps as --phase1_end_step (--max_steps)")
    if not parsed.phase2 and parsed.phase1_end_step:
        parser.error(f"--phase1_end_step {parsed.phase1_end_step} is for phase 2: add --phase2, or leave it out")
    parsed.fp16 = parsed.fp16 or parsed.amp
    if parsed.fp16 and parsed.bf16:
        parser.error("--fp16 and --bf16: take one of the two")
    return parsed


def without_effect(parsed: argparse.Namespace) -> list[str]:
    """A line for each argument that was given and changes nothing."""
    return [f"--{name} changes nothing: {why}" for name, why in DONE_BY_VARUNA.items() if getattr(parsed, name)]


def checkpoint_folder(text: str) -> tuple[str, int]:
    """`STORE/varuna_ckpt_7` as (STORE, 7)."""
    if (match := re.fullmatch(r"(.+)/varuna_ckpt_(\d+)/?", text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no checkpoint: name its folder, …/varuna_ckpt_<step>")
    return match[1], int(match[2])


def _add_what_is_trained(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is trained, on what")
    group.add_argument("--input_dir", type=Path, required=True, help="folder of the .hdf5 files that prepare.py made")
    group.add_argument("--config_file", type=Path, required=True, help="JSON file with the model's sizes")
    group.add_argument("--max_seq_length", type=int, default=512, help="tokens of an example; the data's must be that")
    group.add_argument("--max_predictions_per_seq", type=int, default=80, help="masked words of an example at most")
    group.add_argument(
        "--train_batch_size", type=int, help="examples of a step, over all GPUs; under a manager, the job file gives it"
    )
    group.add_argument("--seed", type=int, default=42, help="of the first parameters, dropout and the examples' order")
    group.add_argument("--fp16", action="store_true", help="matrix products in fp16, with a scaled loss")
    group.add_argument("--amp", action="store_true", help="the same as --fp16")
    group.add_argument("--bf16", action="store_true", help="matrix products in bf16")
    group.add_argument("--loss_scale", type=float, default=0.0, help="with --fp16: a fixed scale; 0: a dynamic one")
    group.add_argument("--init_loss_scale", type=float, default=2.0**20, help="where a dynamic scale starts")


def _add_how_long(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how long, how fast, from where")
    group.add_argument("--max_steps", type=int, default=1000, help="steps of this phase, over all restarts")
    group.add_argument("--steps_this_run", type=int, default=-1, help="end after so many steps; -1: after --max_steps")
    group.add_argument("--learning_rate", type=float, default=6e-3, help="of LAMB, at its highest")
    group.add_argument("--warmup_proportion", type=float, default=0.01, help="part of the steps in which it rises")
    group.add_argument("--phase2", action="store_true", help="go on where phase 1 ended, with a schedule of its own")
    group.add_argument("--phase1_end_step", type=int, default=0, help="with --phase2: the --max_steps of phase 1")
    group.add_argument(
        "--init_checkpoint", type=checkpoint_folder, help="…/varuna_ckpt_<step>: begin with its parameters and moments"
    )
    group.add_argument(
        "--resume_from_checkpoint",
        action="store_true",
        help="by hand: go on from the newest checkpoint in --output_dir; under a manager this is always done",
    )


def _add_what_is_written(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is written")
    group.add_argument("--output_dir", help="folder of checkpoints; under a manager, the job file gives it")
    group.add_argument(
        "--num_steps_per_checkpoint", type=int, default=0, help="0: at the end and, under a manager, whenever it pays"
    )
    group.add_argument("--skip_checkpoint", action="store_true", help="write none, also not at the end")
    group.add_argument("--log_freq", type=int, default=1, help="print every so many steps")
    group.add_argument("--json-summary", type=Path, help="file to which what is printed is added, as JSON lines")


def _add_without_effect(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("taken and not needed")
    for name, why in DONE_BY_VARUNA.items():
        if name == "gradient_accumulation_steps":
            group.add_argument(f"--{name}", type=int, default=0, help=why)
        elif name == "bert_model":
            group.add_argument(f"--{name}", default="", help=why)
        else:
            group.add_argument(f"--{name}", action="store_true", help=why)
    for name in FROM_LAUNCHER:
        group.add_argument(f"--{name}", help=argparse.SUPPRESS)
