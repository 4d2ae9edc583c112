"""What pre-training and its plain PyTorch reference have in common: data, model, optimizer, learning rate."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lamb import Lamb
from model import BertPretraining, read_config
from pretraining_data import PretrainingDataset
from schedule import learning_rate, set_learning_rate

WEIGHT_DECAY = 0.01
NOT_DECAYED = ("bias", "LayerNorm")
"""Parameters with one of these in their name have no weight decay."""


def load_dataset(arguments: argparse.Namespace) -> PretrainingDataset:
    """Raises ValueError when the examples are not of --max_seq_length."""
    dataset = PretrainingDataset(arguments.input_dir, max_predictions_per_seq=arguments.max_predictions_per_seq)
    if dataset.max_seq_length != arguments.max_seq_length:
        raise ValueError(
            f"--max_seq_length {arguments.max_seq_length}, but the examples in {arguments.input_dir} have "
            f"{dataset.max_seq_length} tokens: give that number, or the folder of the other phase"
        )
    return dataset


def build_model(arguments: argparse.Namespace, vocabulary: int | None) -> BertPretraining:
    """The same first parameters in every process."""
    torch.manual_seed(arguments.seed)
    return BertPretraining(read_config(arguments.config_file, vocabulary), arguments.max_predictions_per_seq)


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], arguments: argparse.Namespace) -> Lamb:
    """LAMB with two groups, in this order on every stage: parameters with and without weight decay."""
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in named:
        (rest if any(part in name for part in NOT_DECAYED) else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return Lamb(groups, lr=arguments.learning_rate)


def set_rate(optimizer: Lamb, step: int, arguments: argparse.Namespace) -> float:
    """Gives the optimizer the learning rate of this phase's `step`, and returns it."""
    rate = learning_rate(
        step,
        peak=arguments.learning_rate,
        steps=arguments.max_steps,
        warmup_proportion=arguments.warmup_proportion,
    )
    set_learning_rate(optimizer, rate)
    return rate


def examples(dataset: PretrainingDataset, size: int) -> dict[str, Tensor]:
    """The first `size` examples of the data as a batch, for the dry run and the calibration."""
    batch: dict[str, Tensor] = default_collate([dataset[index % len(dataset)] for index in range(size)])
    return batch
