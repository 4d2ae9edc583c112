"""The batch dimension of a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from varuna.partition.errors import PartitionError

__all__ = ["batch_size_of", "resize_batch", "take_examples"]


def batch_size_of(inputs: Mapping[str, Any]) -> int:
    """The number of examples in `inputs`: the first dimension of its first tensor that has one.

    Raises:
        PartitionError: there is no such tensor.
    """
    for value in inputs.values():
        if isinstance(value, Tensor):  # the usual case, which is fast without flattening
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
    """The chosen examples of `inputs`. Tensors whose first dimension is not the batch, and other values, stay whole."""
    batch = batch_size_of(inputs)

    def take(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[examples] if batched else leaf

    return {name: tree_map(take, value) for name, value in inputs.items()}


def resize_batch(inputs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """`inputs` with `batch` examples, which repeat from the start if there are fewer."""
    have = batch_size_of(inputs)
    if have == 0:
        raise PartitionError("the example inputs are an empty batch; pass at least one example")
    return take_examples(inputs, torch.arange(batch) % have)
