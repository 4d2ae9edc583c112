"""A small GPT, its batches, and its training by plain PyTorch: what Varuna's training is compared with.

Letters: B examples, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna.cut_point import CutPoint

V, T, H = 29, 6, 16


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, however it is spread over processes."""

    global_batch: int = 8
    steps: int = 4
    blocks: int = 4
    dropout: float = 0.0
    tied: bool = False
    declared: bool = False
    """The tied weights are two parameters, and Varuna is told that they are one."""
    clip: float | None = None
    learning_rate: float = 1e-2
    weight_decay: float = 0.01


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mix = nn.Linear(H, H)
        self.feed = nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (x @ x.transpose(1, 2) / H**0.5).masked_fill(~mask, -1e9)
        x = x + self.dropout(scores.softmax(-1) @ self.mix(self.norm(x)))
        return x + self.dropout(self.feed(x))


class SmallGPT(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(Block(task.dropout) for _ in range(task.blocks))
        self.cut_points = [CutPoint() for _ in range(task.blocks - 1)]
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        if task.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block, cut_point in zip(self.blocks, [*self.cut_points, None], strict=True):
            x = block(x)
            if cut_point is not None:
                x = cut_point(x)
        return F.cross_entropy(self.head(self.norm(x)).transpose(1, 2), targets)


def make_model(task: Task) -> SmallGPT:
    torch.manual_seed(7)
    return SmallGPT(task)


def make_optimizer(parameters: object, task: Task) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=task.learning_rate, weight_decay=task.weight_decay)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def example_batch(size: int, device: str = "cpu") -> dict[str, Tensor]:
    return {"tokens": torch.zeros(size, T, dtype=torch.long), "targets": torch.zeros(size, T, dtype=torch.long)}


class Examples(torch.utils.data.Dataset):
    """Example i is the same in every process."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(V, (T + 1,), generator=generator)
        return {"tokens": text[:-1], "targets": text[1:]}


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    evaluated: float
    """The loss of the last batch after training."""
    parameters: dict[str, Tensor]


def train_plainly(task: Task) -> Trained:
    """One process, the whole global batch at once, no Varuna."""
    from varuna.data import Batches

    model = make_model(task)
    optimizer = make_optimizer(model.parameters(), task)
    scheduler = make_scheduler(optimizer)
    losses, norms = [], []
    for _, batch in Batches(Examples(), global_batch=task.global_batch, last_step=task.steps, environ={}):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), task.clip or float("inf"))))
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = model.eval()(**batch).item()
    return Trained(losses, norms, evaluated, {name: p.detach() for name, p in model.named_parameters()})
