"""What operations make of tensors without values, where torch's own rule for it refuses what its kernels can do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["fake_rule", "looks_at_integers_only"]

_aten = torch.ops.aten


def fake_rule(func: Any) -> Any:
    """`func`, or what to call in its place on fake tensors."""
    return _grouped_mm if func is _aten._grouped_mm.default else func


def looks_at_integers_only(func: Any) -> bool:
    """Its result's shape depends on the values of some inputs, but on those of integers (lengths) only."""
    return func.overloadpacket is _aten._ctc_loss


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of g groups: of rows (n, k) with (g, k, m), or of whatever else torch's `grouped_mm` takes.

    torch's own rule takes bfloat16 only; the kernels take all floating-point types.
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
