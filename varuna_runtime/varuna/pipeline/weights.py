"""The weight of a loss: what a mean over micro-batches, replicas and stages is a mean over.

A model returns the mean loss of its examples, and their number is the mean's weight; or it returns `(loss, weight)`,
with the number of target tokens, say. The result is sum(weight * loss) / sum(weight) over the global batch, and its
gradient. The sum of the weights is known only after the last forward, but the first backward comes long before. So each
backward is divided by an *expected* sum, and the gradients are corrected when the ranks have agreed on the true one.
The expectation only has to be near, so that fp16 neither overflows nor underflows; a power of two for each example
makes the correction free of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from varuna.launch import Group

__all__ = ["ExpectedWeight", "WeightedLoss"]


class WeightedLoss:
    """The mean loss of a micro-batch, and its weight. Both stay on the device until they are asked for."""

    def __init__(self, outputs: Sequence[Tensor], examples: int) -> None:
        """`outputs`: of the last stage, the loss and maybe the weight; without it, it is `examples`."""
        self._loss, *self._weight = (output.detach() for output in outputs)
        self.examples = examples

    @cached_property
    def weight(self) -> float:
        """Raises ValueError when the model gave none that a loss can have."""
        weight = float(self._weight[0]) if self._weight else float(self.examples)
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the model returned the weight {weight} with its loss: it must be the number of targets (or another "
                "measure) that the loss is the mean over, finite and not negative"
            )
        return weight

    @property
    def total(self) -> float:
        """Loss times weight. A mean over nothing, which may be NaN, counts 0."""
        return float(self._loss) * self.weight if self.weight else 0.0


class ExpectedWeight:
    """About what the weights of a global batch come to, as the last stages of all replicas know it."""

    def __init__(self, replicas: Group, device: torch.device) -> None:
        """`replicas`: the ranks that hold the same stage as this one, on their `device`s."""
        self._replicas = replicas
        self._device = device
        self._per_example: float | None = None

    def of(self, global_batch: int, weight: float, examples: int) -> float:
        """For a batch in which this rank's first micro-batch has this weight. Called by all last stages."""
        if self._per_example is None:
            sums = torch.tensor([weight, float(examples)], dtype=torch.float64, device=self._device)
            self._replicas.all_reduce([sums])
            self.learn(*sums.tolist())
        return global_batch * (self._per_example or 1.0)

    def learn(self, weight: float, examples: float) -> None:
        """From what a batch has come to. Called by all ranks."""
        if weight > 0 and examples > 0:
            self._per_example = 2.0 ** round(math.log2(weight / examples))
