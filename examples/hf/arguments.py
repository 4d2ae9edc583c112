"""The command line's arguments, with the names that Hugging Face's own scripts use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

SIZES = ("tiny", "default")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Everything but the global batch, which the job gives."""

    model_name_or_path: str = field(
        default="gpt2",
        metadata={"help": "a folder as save_pretrained writes it, or a type (gpt2, llama, bert, …) for a new model"},
    )
    config_size: str = field(
        default="tiny", metadata={"help": "of a new model: tiny, or default (that of the type)", "choices": SIZES}
    )
    train_file: Path | None = field(
        default=None, metadata={"help": "text, or a folder of .txt and .py files (default: Python's own library)"}
    )
    max_train_bytes: int = field(default=400_000, metadata={"help": "of the text that are used"})
    block_size: int = field(default=64, metadata={"help": "tokens of an example"})
    max_steps: int = field(default=100, metadata={"help": "steps to train in all, over all restarts"})
    learning_rate: float = 1e-3
    weight_decay: float = field(default=0.01, metadata={"help": "of matrices; biases and norms have none"})
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    seed: int = 42
    logging_steps: int = 1
    eval_steps: int | None = field(default=None, metadata={"help": "steps between evaluations (default: at the end)"})
    eval_examples: int = field(default=16, metadata={"help": "examples at the end of the text that are not trained on"})
    per_device_train_batch_size: int | None = field(
        default=None, metadata={"help": "global batch of one process without a job"}
    )
    output_dir: Path | None = field(default=None, metadata={"help": "where plain.py saves the model"})
    meta: bool = field(default=False, metadata={"help": "build the model without memory; stages fill in their own"})


def parse(description: str | None) -> Arguments:
    """Parse the command line. Exits with a usage message for unknown arguments."""
    (arguments,) = HfArgumentParser(Arguments, description=description).parse_args_into_dataclasses()
    assert isinstance(arguments, Arguments)
    return arguments
