"""What the training script and its plain PyTorch reference have in common: the model, the optimizer, the samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from corpus import Windows, read_corpus, read_tokens
from model import GPT, GPTConfig
from varuna_planner.profile.models import NAMED_MODELS
from varuna_planner.profile.shapes import ModelFamily, ModelShape

SEED = 0
LEARNING_RATE = 3e-4
TINY = GPTConfig()


def _config_of(shape: ModelShape) -> GPTConfig:
    return GPTConfig(
        blocks=shape.layers, width=shape.hidden, heads=shape.heads, window=shape.seq, vocabulary=shape.vocab
    )


CONFIGS = MappingProxyType(
    {"tiny": TINY}
    | {name: _config_of(shape) for name, shape in NAMED_MODELS.items() if shape.family is ModelFamily.GPT2}
)
"""By name. `varuna estimate --model NAME` plans for all but `tiny`."""


def build_model(config: GPTConfig = TINY) -> GPT:
    """The same initial parameters in every process.

    A large model is built on meta, where it takes no memory: Varuna then makes the parameters of this worker's stage.
    """
    torch.manual_seed(SEED)
    with torch.device("cpu" if config == TINY else "meta"):
        return GPT(config)


def build_optimizer(parameters: Iterable[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)


def load_dataset(config: GPTConfig = TINY, tokens: Path | None = None) -> Windows:
    """Of the file `tokens`, or without one of text as bytes, which every vocabulary of 256 and more can express.

    Raises ValueError when the file has tokens that the model does not know.
    """
    return Windows(read_corpus() if tokens is None else read_tokens(tokens, config.vocabulary), config.window)
