"""Stages of a model run in one process, one after the other, as the engine does over the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varuna.partition import Stage


def run_by_hand(stages: Sequence[Stage], inputs: dict[str, Any]) -> tuple[Tensor, list[list[Tensor]]]:
    """Forward and backward through all stages; returns the loss, and what each stage but the last sent."""
    received: list[Tensor] = []
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    for stage in stages[:-1]:
        sent = stage.forward(inputs, received)
        assert isinstance(sent, list)
        kept.append((received, sent))
        assert [tuple(x.shape) for x in sent] == [
            b.shape_for(next(iter(inputs.values())).shape[0]) for b in stage.sends
        ]
        assert [x.requires_grad for x in sent] == [b.requires_grad for b in stage.sends]
        received = [x.detach().clone().requires_grad_(b.requires_grad) for x, b in zip(sent, stage.sends, strict=True)]
    loss = stages[-1].forward(inputs, received)
    assert isinstance(loss, Tensor)
    loss.backward()
    for before, sent in reversed(kept):
        pairs = [(x, leaf.grad) for x, leaf in zip(sent, received, strict=True) if leaf.requires_grad]
        roots = [(x, g) for x, g in pairs if g is not None]
        torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        received = before
    return loss.detach(), [sent for _, sent in kept]


def gradients(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The gradient of each parameter, summed over the stages that share it."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
    return total
