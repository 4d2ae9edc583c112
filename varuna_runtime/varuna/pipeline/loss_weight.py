"""The weight of a loss in means over micro-batches, replicas and stages.

A model returns the mean loss of its examples, whose number is the weight of the mean; or it returns `(loss, weight)`,
with the number of target tokens, for example. The result is sum(weight * loss) / sum(weight) over the global batch, and
its gradient. The sum of the weights is known only after the last forward, long after the first backward. So each
backward is divided by an *expected* sum, and the gradients are corrected when the ranks have agreed on the true one.
The expectation must only be close, so that fp16 neither overflows nor underflows; a power of two for each example makes
the correction free of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from varuna.distributed.groups import RankGroup

__all__ = ["ExpectedWeight", "WeightedLoss"]


class WeightedLoss:
    """The mean loss of a micro-batch, and its weight. Both stay on the device until they are read."""

    def __init__(self, outputs: Sequence[Tensor], examples: int) -> None:
        """`outputs`: the loss and maybe the weight, from the last stage. Without a weight, it is `examples`."""
        self._loss, *self._weight = (output.detach() for output in outputs)
        self.examples = examples

    @cached_property
    def weight(self) -> float:
        """Raises ValueError when the model returned a number that cannot be a weight."""
        weight = float(self._weight[0]) if self._weight else float(self.examples)
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the model returned the weight {weight} with its loss: it must be the number of targets (or another "
                "measure) that the loss is the mean over, finite and not negative"
            )
        return weight

    @staticmethod
    def sum_losses(losses: Sequence[WeightedLoss]) -> float:
        """The sum of loss times weight. A mean over nothing, which may be NaN, counts as 0.

        The host reads all losses at once, because each read waits for the device.
        """
        counted = [loss for loss in losses if loss.weight]
        if not counted:
            return 0.0
        values: list[float] = torch.stack([loss._loss.reshape(()) for loss in counted]).tolist()
        return sum(value * loss.weight for value, loss in zip(values, counted, strict=True))


class ExpectedWeight:
    """The approximate sum of the weights of a global batch, equal on the last stages of all replicas."""

    def __init__(self, replicas: RankGroup, device: torch.device) -> None:
        """`replicas`: the ranks that hold the same stage as this one, on their `device`s."""
        self._replicas = replicas
        self._device = device
        self._per_example: float | None = None

    def follow_replicas(self, replicas: RankGroup) -> None:
        """From now on these ranks hold the same stage as this one."""
        self._replicas = replicas

    @property
    def is_known(self) -> bool:
        """Whether `estimate_sum` needs no message."""
        return self._per_example is not None

    @property
    def per_example(self) -> float | None:
        """None: it is not known."""
        return self._per_example

    def follow_others(self, per_example: float) -> None:
        """Expects what the other ranks do."""
        self._per_example = per_example

    def estimate_sum(self, global_batch: int, weight: float, examples: int) -> float:
        """The sum for a batch in which this rank's first micro-batch has this weight. All last stages must call it."""
        if self._per_example is None:
            sums = torch.tensor([weight, float(examples)], dtype=torch.float64, device=self._device)
            self._replicas.all_reduce([sums])
            self.learn_from_batch(*sums.tolist())
        return global_batch * (self._per_example or 1.0)

    def learn_from_batch(self, weight: float, examples: float) -> None:
        """Updates the expectation with the sums of a batch. All ranks must call it."""
        if weight > 0 and examples > 0:
            self._per_example = 2.0 ** round(math.log2(weight / examples))
