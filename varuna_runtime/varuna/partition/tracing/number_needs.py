"""Operations that fail, or give indices that do not exist, where their tensors are not numbers (NaN).

Code of earlier sections that still runs in a later stage gets NaN in place of what that stage does not have. It uses no
result of this, but it must not fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varuna.partition.cutting.graph import Value

__all__ = ["needs_numbers"]

_NAMES = frozenset(
    {
        "_sample_dirichlet",
        "_standard_gamma",
        "bernoulli",
        "bernoulli_",
        "binary_cross_entropy",
        "binomial",
        "histc",
        "inverse",
        "multinomial",
        "normal",
        "poisson",
    }
)
_FAMILIES = ("linalg_", "_linalg_", "cholesky")
_ALWAYS_WORK = frozenset({"linalg_cross", "linalg_vector_norm"})
_FIND_ROWS = frozenset({"argmax", "argmin"})
"""Their indices exist whatever they look at."""


def needs_numbers(func: Any, inputs: Sequence[Value], outputs: Sequence[Tensor]) -> bool:
    """Whether this operation fails on what is not a number, or makes an index of it."""
    given = [value.dtype for value in inputs if value.dependent]
    if not any(dtype.is_floating_point or dtype.is_complex or dtype == torch.bool for dtype in given):
        return False
    name = func.overloadpacket.__name__
    if name in _NAMES or (name.startswith(_FAMILIES) and name not in _ALWAYS_WORK):
        return True
    return len(outputs) == 1 and _is_integer(outputs[0].dtype) and name not in _FIND_ROWS


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
