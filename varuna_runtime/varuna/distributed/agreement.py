"""The one small reduction over all ranks at the end of a step, after which all ranks have the same totals."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field, fields

import torch

from varuna.distributed.groups import RankGroup

__all__ = ["BoundaryRequests", "StepTotals", "agree_on_totals"]


@dataclass(frozen=True, kw_only=True)
class BoundaryRequests:
    """The requests of one rank, or after the reduction of any rank, for the coming step boundary."""

    save: bool = False
    busy: bool = False
    """An earlier save is in flight, so another must not start."""
    leave: bool = False
    """Save, then leave the generation."""
    hold: bool = False
    """Leave the generation with the state in memory."""
    cannot_hold: bool = False
    """The state of a rank ends with its process, so all save before they leave."""
    copying: bool = False
    """The copy of a rank's state is not whole on its keeper, so another round of copies must not begin."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """One rank's part of the totals, or the totals over all ranks."""

    loss_sum: float
    """Sum over micro-batches of mean loss times weight."""
    examples: int
    weight: float = 0.0
    """The weight of `loss_sum`: the number of examples, or the weight that the model gives."""
    expected_weight: float = 0.0
    """The weight by which the backward passes divided."""
    squared_norm: float = 0.0
    """Of the gradient."""
    example_s: float = 0.0
    """What a pass took for each of its examples: the mean over all ranks, to which each adds its part."""
    requests: BoundaryRequests = field(default_factory=BoundaryRequests)
    changed: bool = False
    """The script has changed the model, so the pass does not count (`script_changes.py`)."""

    @property
    def loss(self) -> float:
        """The mean over the weights; NaN when they are all 0. Raises ValueError when there are no examples."""
        if self.examples == 0:
            raise ValueError("no rank had an example in this batch: inputs need at least one")
        return self.loss_sum / self.weight if self.weight else math.nan


def agree_on_totals(group: RankGroup, own: StepTotals) -> StepTotals:
    """The sums over all ranks, in float64 and equal to the last bit on all; a request of one rank is one of all."""
    requests = own.requests
    numbers = [own.loss_sum, own.examples, own.weight, own.expected_weight, own.squared_norm, own.example_s]
    values = [*numbers, *astuple(requests), own.changed]
    vector = torch.tensor([float(value) for value in values], dtype=torch.float64)
    group.all_reduce([vector])
    loss_sum, examples, weight, expected_weight, squared_norm, example_s, *flags, changed = vector.tolist()
    return StepTotals(
        loss_sum=loss_sum,
        examples=round(examples),
        weight=weight,
        expected_weight=expected_weight,
        squared_norm=squared_norm,
        example_s=example_s,
        requests=BoundaryRequests(**{each.name: flag > 0 for each, flag in zip(fields(requests), flags, strict=True)}),
        changed=changed > 0,
    )
