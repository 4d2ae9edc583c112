"""The one small reduction over all ranks at the end of a step: after it every rank knows the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from varuna.launch import Group
from varuna.saves import Wishes

__all__ = ["Totals", "agree"]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What one rank adds, or what all ranks together came to."""

    loss_sum: float
    """Sum over micro-batches of mean loss times weight."""
    examples: int
    weight: float = 0.0
    """That `loss_sum` is over: the number of examples, or what the model gives instead."""
    expected_weight: float = 0.0
    """By which backwards were divided."""
    squared_norm: float = 0.0
    """Of the gradient."""
    wishes: Wishes = field(default_factory=Wishes)
    changed: bool = False
    """The script has changed the model, so the pass was in vain (script_changes.py)."""

    @property
    def loss(self) -> float:
        """The mean over the weights; NaN when they are all 0. Raises ValueError when there are no examples."""
        if self.examples == 0:
            raise ValueError("no rank had an example in this batch: inputs need at least one")
        return self.loss_sum / self.weight if self.weight else math.nan


def agree(group: Group, own: Totals) -> Totals:
    """The sums over all ranks; a wish of any is a wish of all. In float64; equal to the last bit everywhere."""
    wishes = own.wishes
    numbers = [own.loss_sum, own.examples, own.weight, own.expected_weight, own.squared_norm]
    values = [*numbers, wishes.save, wishes.busy, wishes.leave, own.changed]
    vector = torch.tensor([float(value) for value in values], dtype=torch.float64)
    group.all_reduce([vector])
    loss_sum, examples, weight, expected_weight, squared_norm, save, busy, leave, changed = vector.tolist()
    return Totals(
        loss_sum=loss_sum,
        examples=round(examples),
        weight=weight,
        expected_weight=expected_weight,
        squared_norm=squared_norm,
        wishes=Wishes(save=save > 0, busy=busy > 0, leave=leave > 0),
        changed=changed > 0,
    )
