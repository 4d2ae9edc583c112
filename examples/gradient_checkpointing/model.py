"""A deep network whose blocks may be checkpointed: their activations are computed again in the backward, not kept.

Letters: B examples, I inputs, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

INPUTS = 32


class Block(nn.Module):
    """A two-layer perceptron with dropout beside a residual path: (B, H) to (B, H)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.norm(x)))))


class Net(nn.Module):
    """`forward` returns the mean loss, as Varuna expects of a model. It does not refer to Varuna."""

    def __init__(self, *, chunks: int, blocks: int = 12, width: int = 256, dropout: float = 0.1) -> None:
        """`chunks`: runs of blocks that keep only their input for the backward; 0: all activations are kept."""
        super().__init__()
        self.chunks = chunks
        self.enter = nn.Linear(INPUTS, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(blocks)))
        self.leave = nn.Linear(width, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, I) and (B,) to the mean squared error."""
        x = self.enter(inputs)
        if self.chunks:
            x = checkpoint_sequential(self.blocks, self.chunks, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return F.mse_loss(self.leave(x).squeeze(1), targets)


class Examples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Made up: the same in every process."""

    def __init__(self, count: int = 4096) -> None:
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, INPUTS, generator=random)
        self.targets = self.inputs.abs().sum(1).sqrt()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`inputs` (I,) and `targets` ()."""
        return {"inputs": self.inputs[index], "targets": self.targets[index]}

    def batch(self, size: int) -> dict[str, Tensor]:
        """The first ones: `inputs` (B, I) and `targets` (B,)."""
        return {"inputs": self.inputs[:size], "targets": self.targets[:size]}
