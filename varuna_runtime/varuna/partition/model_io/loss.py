"""The loss in what a model returns, and the loss's weight beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from varuna.partition.errors import PartitionError

__all__ = ["loss_and_weight_of", "loss_of", "weight_candidate"]


def loss_of(result: Any) -> Tensor:
    """The scalar loss in what a model returned: a tensor, the first of a tuple, or `loss` of a mapping or object.

    Raises:
        PartitionError: there is none, or it is not a scalar.
    """
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif isinstance(result, tuple | list) and not hasattr(result, "loss"):
        loss = result[0] if result else None
    elif not isinstance(result, Tensor):
        loss = getattr(result, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(result).__name__}"
        raise PartitionError(
            f"the model returned {what} where its loss should be; it must return the scalar mean loss, a tuple that "
            "starts with it, or a mapping or object with `loss`"
        )
    return loss.reshape(())


def weight_candidate(result: Any) -> Tensor | float | None:
    """The number that a model returned behind its loss, which may be the loss's weight; None without one.

    The dry run decides whether it is the weight: a number that depends on parameters (an accuracy, a part of the loss)
    is not.
    """
    if not isinstance(result, tuple | list) or hasattr(result, "loss") or len(result) != 2:
        return None
    number = result[1]
    if isinstance(number, Tensor):
        return number if number.numel() == 1 else None
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


def loss_and_weight_of(result: Any) -> list[Tensor]:
    """Loss and weight as scalars, of a model that returned a weight in the dry run.

    Raises PartitionError if it returns none now.
    """
    loss, weight = loss_of(result), weight_candidate(result)
    if weight is None:
        raise PartitionError(
            f"the model returned {type(result).__name__} where (loss, weight) should be, which is what it returned in "
            "the dry run; return both in every call"
        )
    return [loss, torch.as_tensor(weight, dtype=torch.float64).reshape(())]
