"""The outputs of operations on tensors without values, where torch's own rule refuses what its kernels can do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["fake_rule", "looks_at_integers_only"]

_aten = torch.ops.aten


def fake_rule(func: Any) -> Any:
    """`func`, or the function to call instead of it on fake tensors."""
    return _grouped_mm if func is _aten._grouped_mm.default else func


def looks_at_integers_only(func: Any) -> bool:
    """Whether the shape of the result depends on values of integer inputs (lengths), but on no others."""
    return func.overloadpacket is _aten._ctc_loss


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of g groups: rows (n, k) with (g, k, m), and the other shapes that torch's `grouped_mm` takes.

    torch's own rule accepts only bfloat16; the kernels accept all floating-point types.
    """
    shape: tuple[int, ...]
    if self.dim() == 2 and mat2.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], self.shape[0], mat2.shape[1])
    elif self.dim() == 3 and mat2.dim() == 3:
        shape = (self.shape[0], self.shape[1], mat2.shape[2])
    else:
        shape = (self.shape[-2], mat2.shape[-1])
    return self.new_empty(shape, dtype=out_dtype or self.dtype)
