"""Small models that draw random numbers in the ways that people's models do.

Letters: B examples, T tokens, C channels, A attention heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

T, C, A = 6, 8, 2


class DropPath(nn.Module):
    """Stochastic depth: leaves a branch out for whole examples."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1, 1, device=x.device) >= self.p) / (1 - self.p)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, A, C // A).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3 if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MergedAttention(nn.Module):
    """With weights of shape (B·A, T, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(C, 3 * C), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        q, k, v = (
            y.view(b, T, A, C // A).transpose(1, 2).reshape(b * A, T, C // A) for y in self.qkv(x).chunk(3, dim=-1)
        )
        weights = self.dropout((q @ k.transpose(1, 2)).softmax(-1))
        return (weights @ v).view(b, A, T, C // A).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(C), attention
        self.feed = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * C, C))
        self.dropout, self.path = nn.Dropout(0.1), DropPath(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.path(self.dropout(self.attention(self.norm(x))))
        return x + self.path(self.feed(x))


class GPT(nn.Module):
    """A causal language model: dropout, attention dropout."""

    def __init__(self, attention: type[nn.Module] = FusedAttention) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(C, C), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(3))
        self.head = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.embedding(x.abs().mul(4).long() % C)[:, :, 0])
        for block in self.blocks:
            y = block(y)
        return F.mse_loss(self.head(y), x)


class ViT(nn.Module):
    """Images in patches, with whole channels dropped, noise on the inputs and a number for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.channels = nn.Conv2d(1, C, 2, stride=2), nn.Dropout2d(0.2)
        self.blocks = nn.ModuleList(Block(MergedAttention()) for _ in range(3))
        self.head = nn.Linear(C, 4)

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(x.shape[0], 1, 4, T * C // 4)
        if self.training:
            images = images + 0.1 * torch.randn_like(images) + 0.1 * torch.rand(())
        y = self.channels(self.patches(images)).flatten(2).transpose(1, 2)[:, :T]
        for block in self.blocks:
            y = block(y)
        return self.head(F.dropout(y.mean(1), 0.1, self.training)).square().mean()


class TimeFirst(nn.Module):
    """Tensors of shape (T, B, C), as recurrent layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(C, C, num_layers=3, dropout=0.3)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.layers(x.transpose(0, 1))[0])
        return F.mse_loss(self.head(y).transpose(0, 1), x)


class Sampling(nn.Module):
    """Distributions that parameters or inputs give."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.head = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.mean(x), F.softplus(self.spread(x))
        y = mean + spread * torch.randn_like(mean) + torch.normal(mean.detach(), spread.detach())
        y = y + torch.bernoulli(spread.detach().clamp(0, 1)) + F.gumbel_softmax(mean) + torch.poisson(x.abs())
        chosen = torch.multinomial(x[:, 0].exp(), 2)
        y = F.rrelu(y, training=self.training) + F.alpha_dropout(y, 0.2, self.training)
        y = y + torch.randint(3, (x.shape[0], T, 1)) + torch.randperm(T)[:, None] + chosen.sum(1)[:, None, None]
        return F.mse_loss(self.head(y).tanh(), x)


class Checkpointed(nn.Module):
    """Parts of the forward run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def forward(self, x: Tensor) -> Tensor:
        y = self.model.dropout(self.model.head(x))
        for block in self.model.blocks:
            y = checkpoint(block, y, use_reentrant=False)
        return F.mse_loss(self.model.head(y), x)


class Mixed(nn.Module):
    """Attention of both kinds, cut behind each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Linear(C, C), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(kind()) for kind in (FusedAttention, MergedAttention) * 2)
        self.head = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.embedding(x)) + 0.1 * torch.rand(T, 1, device=x.device)
        for block in self.blocks:
            y = block(y)
        return F.mse_loss(self.head(y), x)


def batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Example i is the same in every batch."""
    return {
        "x": torch.stack([torch.randn(T, C, generator=torch.Generator().manual_seed(i)) for i in range(size)]).to(
            device
        )
    }


MODELS = {"gpt": GPT, "vit": ViT, "time first": TimeFirst, "sampling": Sampling, "checkpointed": Checkpointed}
