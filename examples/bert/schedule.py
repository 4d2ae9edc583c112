"""The learning rate of a step: NVIDIA's polynomial decay with warm-up."""

from __future__ import annotations

from torch.optim import Optimizer

DEGREE = 0.5


def learning_rate(step: int, *, peak: float, steps: int, warmup_proportion: float) -> float:
    """Of `step` (1 … `steps`): it rises in proportion to the step, then falls as the square root of what is left.

    It is a function of the step alone, so it needs no place in a checkpoint.
    """
    progress = step / steps
    if progress < warmup_proportion:
        return peak * progress / warmup_proportion
    return float(peak * max(0.0, 1.0 - progress) ** DEGREE)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
