"""What the model is called with and what it returns: the batch dimension of its inputs, the loss in its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from varuna.partition.errors import PartitionError

__all__ = ["batch_size_of", "loss_and_weight_of", "loss_of", "number_beside", "resized", "take_examples"]


def batch_size_of(inputs: Mapping[str, Any]) -> int:
    """How many examples `inputs` holds: the first dimension of its first tensor that has one.

    Raises:
        PartitionError: there is no such tensor.
    """
    for value in inputs.values():
        if isinstance(value, Tensor):  # the usual case, without taking anything apart
            leaves = [value]
        else:
            leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
        for leaf in leaves:
            if leaf.dim() > 0:
                return leaf.shape[0]
    raise PartitionError(
        f"the model's inputs ({', '.join(inputs) or 'none'}) hold no tensor whose first dimension is the batch; "
        "pass the examples as tensors of shape (batch, …)"
    )


def take_examples(inputs: Mapping[str, Any], examples: slice | Tensor) -> dict[str, Any]:
    """The chosen examples of `inputs`. Tensors whose first dimension is not the batch, and all else, stay whole."""
    batch = batch_size_of(inputs)

    def take(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[examples] if batched else leaf

    return {name: tree_map(take, value) for name, value in inputs.items()}


def resized(inputs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """`inputs` with `batch` examples, repeated from the start when there are fewer."""
    have = batch_size_of(inputs)
    if have == 0:
        raise PartitionError("the example inputs are an empty batch; pass at least one example")
    return take_examples(inputs, torch.arange(batch) % have)


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


def number_beside(result: Any) -> Tensor | float | None:
    """What a model returned behind its loss, if that may be the loss's weight: the second of two, a number.

    Whether it is the weight, the dry run decides: what depends on parameters (an accuracy, a part of the loss) is not.
    """
    if not isinstance(result, tuple | list) or hasattr(result, "loss") or len(result) != 2:
        return None
    number = result[1]
    if isinstance(number, Tensor):
        return number if number.numel() == 1 else None
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


def loss_and_weight_of(result: Any) -> list[Tensor]:
    """Both as scalars, of a model whose dry run has found that it returns a weight. Raises PartitionError."""
    loss, weight = loss_of(result), number_beside(result)
    if weight is None:
        raise PartitionError(
            f"the model returned {type(result).__name__} where (loss, weight) should be, which is what it returned in "
            "the dry run; return both in every call"
        )
    return [loss, torch.as_tensor(weight, dtype=torch.float64).reshape(())]
