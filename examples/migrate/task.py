"""What all scripts of this folder train: a small Transformer, which tells a sequence's most frequent token."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

TOKENS, LENGTH, HIDDEN, BLOCKS = 16, 12, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.norms = nn.ModuleList((nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        mixed: Tensor = x + self.mlp(self.norms[1](x))
        return mixed


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """B×T tokens to B×V scores."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(TOKENS, (count, LENGTH), generator=generator)
        self.labels = self.tokens.mode(1).values

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


def load_datasets() -> tuple[Sequences, Sequences]:
    return Sequences(512, seed=1), Sequences(64, seed=2)


def parse_arguments(text: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--steps", type=int, default=128, help="updates of the parameters")
    parser.add_argument("--in-order", action="store_true", help="take the examples in the dataset's order")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="where the scripts without Varuna save")
    return parser.parse_args()
