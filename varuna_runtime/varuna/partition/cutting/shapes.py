"""Shapes that depend on the batch size, from two dry runs.

Letters: b = examples in the (micro-)batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Boundary", "DrawSpec", "LinearSize", "TensorSpec", "learn_shape", "learn_size"]


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A number that is `fixed + per_example * b`."""

    fixed: int
    per_example: int = 0

    def for_batch(self, batch: int) -> int:
        return self.fixed + self.per_example * batch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and requires_grad of a tensor for every batch size."""

    sizes: tuple[LinearSize, ...]
    dtype: torch.dtype
    requires_grad: bool

    def shape_for(self, batch: int) -> tuple[int, ...]:
        return tuple([size.for_batch(batch) for size in self.sizes])


@dataclass(frozen=True, slots=True)
class Boundary:
    """One tensor that crosses from a stage to the next.

    `shape` has -1 where the batch is (dimension `batch_dim`; None: the tensor is the same for every batch size). That
    dimension has `rows_per_example * b` rows: 1 for the ordinary (b, …), T for tokens flattened to (b·T, …).
    A tensor that requires a gradient gets one of the same shape and type back, or none if the loss does not depend on
    it.
    """

    name: str
    shape: tuple[int, ...]
    batch_dim: int | None
    dtype: torch.dtype
    """On the wire."""
    requires_grad: bool
    rows_per_example: int = 1
    made_as: torch.dtype | None = None
    """The type that it has in the model, on both sides; None: the same."""

    def shape_for(self, batch: int) -> tuple[int, ...]:
        """The shape for a micro-batch of `batch` examples."""
        return tuple([batch * self.rows_per_example if size == -1 else size for size in self.shape])

    def bytes_for(self, batch: int) -> int:
        """Bytes on the wire for a micro-batch of `batch` examples."""
        count = self.dtype.itemsize
        for size in self.shape_for(batch):
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class DrawSpec:
    """One random draw of the forward."""

    section: int
    place: str
    sizes: tuple[LinearSize, ...]
    batch_dim: int | None
    """The dimension of the examples; None: the draw is the same for every batch size."""
    problem: str = ""
    """Why the numbers cannot belong to examples; empty if they can."""

    def matches_shape(self, shape: Sequence[int], examples: int) -> bool:
        """Whether the draw has exactly this shape for this number of examples."""
        return len(shape) == len(self.sizes) and all(
            size.for_batch(examples) == actual for size, actual in zip(self.sizes, shape, strict=True)
        )

    def may_match_shape(self, shape: Sequence[int], examples: int) -> bool:
        """Whether the draw may have this shape if sizes other than the batch's differ from the dry run's."""
        if len(shape) != len(self.sizes):
            return False
        return self.batch_dim is None or shape[self.batch_dim] % max(examples, 1) == 0


def learn_size(batches: tuple[int, int], sizes: tuple[int, int]) -> LinearSize:
    """The size as a line through two dry runs, with its slope rounded down to a whole number."""
    per_example = (sizes[1] - sizes[0]) // (batches[1] - batches[0])
    return LinearSize(sizes[0] - per_example * batches[0], per_example)


def learn_shape(batches: tuple[int, int], first: Sequence[int], second: Sequence[int]) -> tuple[LinearSize, ...]:
    """One `LinearSize` per dimension; both shapes have as many dimensions."""
    return tuple(learn_size(batches, pair) for pair in zip(first, second, strict=True))
