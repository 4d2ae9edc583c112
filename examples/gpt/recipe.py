"""What the training script and its plain PyTorch reference have in common: the model, the optimizer, the samples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from corpus import Windows, read_corpus
from model import GPT, GPTConfig

SEED = 0
LEARNING_RATE = 3e-4
CONFIG = GPTConfig()


def build_model() -> GPT:
    """The same initial parameters in every process."""
    torch.manual_seed(SEED)
    return GPT(CONFIG)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)


def load_dataset() -> Windows:
    return Windows(read_corpus(), CONFIG.window)
