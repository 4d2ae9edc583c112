"""A language model small enough to be calibrated in a second."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna import CutPoint

__all__ = ["BLOCKS", "CPU", "TOKENS", "WIDTH", "WORDS", "TinyLanguageModel", "get_batch"]

BLOCKS, WIDTH, TOKENS, WORDS = 3, 32, 16, 50


CPU = torch.device("cpu")


class TinyLanguageModel(nn.Module):
    """Sections 0 to 2: a block each (0 with the embedding); 3: the head, tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            hidden = cut(hidden + torch.tanh(block(hidden)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def get_batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    tokens = torch.arange(size * TOKENS, device=device).view(size, TOKENS) % WORDS
    return {"tokens": tokens, "targets": tokens}
