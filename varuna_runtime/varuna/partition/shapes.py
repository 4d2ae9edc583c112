"""Shapes that depend on the batch size, learnt from two dry runs.

Letters: b = examples in the (micro-)batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Boundary", "Size", "TensorSpec", "learn_shape", "learn_size"]


@dataclass(frozen=True, slots=True)
class Size:
    """A number that is `fixed + per_example * b`."""

    fixed: int
    per_example: int = 0

    def at(self, batch: int) -> int:
        return self.fixed + self.per_example * batch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and requires_grad of a tensor for every batch size."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool

    def shape_for(self, batch: int) -> tuple[int, ...]:
        return tuple([size.at(batch) for size in self.sizes])


@dataclass(frozen=True, slots=True)
class Boundary:
    """One tensor that crosses from a stage to the next.

    `shape` has -1 where the batch is (dimension `batch_dim`; None: the tensor is the same for every batch size). That
    dimension has `rows_per_example * b` rows: 1 for the ordinary (b, …), T for tokens flattened to (b·T, …).
    A tensor that requires a gradient gets one of the same shape back, or none when nothing behind it reached the loss.
    """

    name: str
    shape: tuple[int, ...]
    batch_dim: int | None
    dtype: torch.dtype
    requires_grad: bool
    rows_per_example: int = 1

    def shape_for(self, batch: int) -> tuple[int, ...]:
        """The shape for a micro-batch of `batch` examples."""
        return tuple([batch * self.rows_per_example if size == -1 else size for size in self.shape])

    def bytes_for(self, batch: int) -> int:
        """Bytes on the wire for a micro-batch of `batch` examples."""
        count = self.dtype.itemsize
        for size in self.shape_for(batch):
            count *= size
        return count


def learn_size(batches: tuple[int, int], sizes: tuple[int, int]) -> Size:
    """The size as a line through two dry runs (rounded down when there is no whole line through them)."""
    per_example = (sizes[1] - sizes[0]) // (batches[1] - batches[0])
    return Size(sizes[0] - per_example * batches[0], per_example)


def learn_shape(batches: tuple[int, int], first: Sequence[int], second: Sequence[int]) -> tuple[Size, ...]:
    """One `Size` per dimension; both shapes have as many dimensions."""
    return tuple(learn_size(batches, pair) for pair in zip(first, second, strict=True))
