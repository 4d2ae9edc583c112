"""How much work an operation is, from its shapes: the same on every rank, and without memory or a device.

Where the model is cut must be the same in every process and after every restart, which measured times are not. They
come later: the planner balances the stages over the sections by the times of the profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

__all__ = ["cost_of"]

_FLOPS_PER_BYTE = 20.0
"""Floating-point operations in the time that writing a byte takes: from 10 on processors to 150 on GPUs."""

_SDPA_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # not among torch's formulas


def cost_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> float:
    """Work of one operation, in floating-point operations: its arithmetic, and the bytes that it writes."""
    if func.is_view:
        return 0.0
    cost = _FLOPS_PER_BYTE * sum(x.numel() * x.element_size() for x in tree_flatten(output)[0] if isinstance(x, Tensor))
    if func is _SDPA_ON_CPU:
        cost += sdpa_flop_count(*(x.shape for x in args[:3]))  # type: ignore[no-untyped-call]
    elif func.overloadpacket in flop_registry:
        cost += flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
    return cost
