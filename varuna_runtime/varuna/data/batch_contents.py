"""Whether a script has changed a batch since it got it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

__all__ = ["BatchContents"]

_MOST_COMPARED = 2**19
"""How many values of a tensor on another device are compared at most."""


class BatchContents:
    """What a batch had when the script got it: the same tensors, not copies, with their versions.

    PyTorch counts each change in place of a tensor as a version. A change that passes it by, through `.data` or
    `.numpy()`, is not seen.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._values = {name: _Value.of(value) for name, value in batch.items()}

    def are_in(self, batch: Mapping[str, Any]) -> bool:
        """Whether what `batch` has now is unchanged: the same objects, or other tensors with the same values, as on
        another device. Names may be missing."""
        return all(name in self._values and self._values[name].is_same(value) for name, value in batch.items())


class _Value(NamedTuple):
    """What the batch had under one name."""

    leaves: list[Any]
    versions: list[int]
    structure: TreeSpec

    @classmethod
    def of(cls, value: Any) -> _Value:
        leaves, structure = tree_flatten(value)
        return cls(leaves, [_version_of(leaf) for leaf in leaves], structure)

    def is_same(self, value: Any) -> bool:
        if [_version_of(leaf) for leaf in self.leaves] != self.versions:
            return False
        leaves, structure = tree_flatten(value)
        return structure == self.structure and all(map(_are_equal, leaves, self.leaves))


def _version_of(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def _are_equal(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if not (isinstance(now, Tensor) and isinstance(before, Tensor)) or now.layout is not torch.strided:
        return False
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    if now.device == before.device:
        return _have_equal_values(now, before)
    # A large batch takes as long on its way back as there. An odd stride seldom falls on one column only.
    stride = now.numel() // _MOST_COMPARED | 1
    sample = now.flatten()[::stride].to(before.device)
    return _version_of(now) == 0 and _have_equal_values(sample, before.flatten()[::stride])


def _have_equal_values(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to NaN here: data sets have it where a value is missing."""
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
