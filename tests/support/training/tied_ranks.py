"""Ranks of every shape that hold a small model with tied weights, as the engine would hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from varuna.checkpoint import ShapePosition, StateScope, TrainingState

__all__ = ["OPTIMIZERS", "SECTIONS", "USES", "Rank", "Tied", "ranks_of", "train_step", "trained"]

SECTIONS = 4

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, betas=(0.8, 0.95)),
}


class Tied(nn.Module):
    """Section 0: an embedding; 1 and 2: linears, 2 with a buffer; 3: a norm and the embedding again."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(self.embedding(tokens))))
        return (self.norm(hidden) @ self.embedding.weight.T).square().mean()


SECTION_OF = {
    "embedding.weight": 0,
    "first.weight": 1,
    "first.bias": 1,
    "second.weight": 2,
    "second.bias": 2,
    "seen": 2,
    "norm.weight": 3,
    "norm.bias": 3,
}
USES = {**{name: {section} for name, section in SECTION_OF.items()}, "embedding.weight": {0, 3}}


class Rank:
    """What the engine holds on one rank: its stage's parameters of its own copy of the model."""

    def __init__(
        self, p: int, d: int, rank: int, make_optimizer: MakeOptimizer, model: nn.Module | None = None
    ) -> None:
        stage = rank % p
        self.model = Tied(seed=rank + 1) if model is None else copy.deepcopy(model)
        self.sections = range(SECTIONS * stage // p, SECTIONS * (stage + 1) // p)
        mine = {name for name, uses in USES.items() if uses & set(self.sections)}
        self.parameters = {name: value for name, value in self.model.named_parameters() if name in mine}
        self.buffers = {name: value for name, value in self.model.named_buffers() if name in mine}
        self.optimizer = make_optimizer(self.parameters.values())
        self.position = ShapePosition(rank=rank, p=p, d=d)
        self.averages: dict[str, Tensor] = {}
        self.user: dict[str, Any] = {}
        self.scopes: dict[str, StateScope] = {}

    @property
    def state(self) -> TrainingState:
        return TrainingState(
            sections=self.sections,
            section_count=SECTIONS,
            parameters=self.parameters,
            section_of=SECTION_OF,
            tied={"embedding.weight"},
            optimizers=(self.optimizer,),
            buffers=self.buffers,
            averages=self.averages,
            user=self.user,
            user_scopes=self.scopes,
            position=self.position,
            seed=5,
        )


def trained(make_optimizer: MakeOptimizer, steps: int = 3) -> tuple[Tied, Optimizer]:
    model = Tied()
    optimizer = make_optimizer(model.parameters())
    for _ in range(steps):
        train_step(model, optimizer)
    model.get_buffer("seen").fill_(steps)
    return model, optimizer


def train_step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(7)).backward()
    optimizer.step()


def ranks_of(model: Tied, optimizer: Optimizer, make_optimizer: MakeOptimizer, p: int, d: int) -> list[Rank]:
    """Ranks of a P×D generation that stand where `model` and `optimizer` stand."""
    of_name = {name: optimizer.state.get(value, {}) for name, value in model.named_parameters()}
    ranks = [Rank(p, d, rank, make_optimizer, model) for rank in range(p * d)]
    for rank in ranks:
        for name, parameter in rank.parameters.items():
            if of_name[name]:
                rank.optimizer.state[parameter] = copy.deepcopy(of_name[name])
    return ranks
