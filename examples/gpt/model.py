"""GPT-2 as one would write it without Varuna, plus a CutPoint after the embedding and after each block.

Shapes: B examples, T tokens, H width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna import CutPoint

BYTE_VALUES = 256
NOT_PREDICTED = -100
"""A target that is padding: `F.cross_entropy`'s own default."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The model's size. With the defaults a step takes a fraction of a second on a laptop."""

    blocks: int = 6
    width: int = 128
    heads: int = 4
    window: int = 128
    """Tokens of one example."""
    vocabulary: int = BYTE_VALUES
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


class Linear(nn.Linear):
    """With GPT-2's initial values, which `reset_parameters` also makes for a model that was built on meta."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """With GPT-2's initial values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each after a norm and beside a residual path."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = Linear(config.width, 3 * config.width)
        self.attention_out = Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = Linear(config.width, 4 * config.width)
        self.mlp_out = Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) to (B, T, H)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class GPT(nn.Module):
    """Predicts each token from those before it. `forward` returns the mean loss and the number of its tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = Embedding(config.vocabulary, config.width)
        self.position_embedding = Embedding(config.window, config.width)
        self.embedding_cut = CutPoint()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.cut_points = nn.ModuleList(CutPoint() for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight  # tied, as in GPT-2: Varuna finds that by itself

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) and (B, T) token numbers to the mean cross-entropy, in nats per token, and the number of tokens.

        Varuna weighs micro-batches by that number, so padding changes nothing, however a batch is cut.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_cut(self.token_embedding(tokens) + self.position_embedding(positions))
        for block, cut_point in zip(self.blocks, self.cut_points, strict=True):
            x = cut_point(block(x))
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_PREDICTED)
        return loss, (targets != NOT_PREDICTED).sum()
