"""The work of an operation, from its shapes: the same on every rank, without memory or a device.

The model must be cut at the same places in every process and after every restart, so measured times cannot decide.
The planner uses them later, when it balances the stages over the sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from varuna.partition.tracing.operation_calls import tensors_in

__all__ = ["operation_cost"]

_FLOPS_PER_BYTE = 20.0
"""Floating-point operations in the time that it takes to write a byte: 10 on processors to 150 on GPUs."""

_SDPA_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # not among torch's formulas


def operation_cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> float:
    """The work of one operation, in floating-point operations, with the bytes that it writes."""
    if func.is_view:
        return 0.0
    cost = _FLOPS_PER_BYTE * sum(x.numel() * x.element_size() for x in tensors_in(output))
    if func is _SDPA_ON_CPU:
        cost += sdpa_flop_count(*(x.shape for x in args[:3]))  # type: ignore[no-untyped-call]
    elif func.overloadpacket in flop_registry:
        cost += flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
    return cost
