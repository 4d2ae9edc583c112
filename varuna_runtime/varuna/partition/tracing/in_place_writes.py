"""The tensors that an operation of the dispatcher changes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from varuna.partition.tracing.operation_calls import tensors_in

__all__ = ["written_tensors"]


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes in place."""
    if _never_writes(func):
        return []
    given = {x.name: args[i] if i < len(args) else kwargs.get(x.name) for i, x in enumerate(func._schema.arguments)}
    names = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    if given.get("training"):
        names += ["running_mean", "running_var"]  # batch norm changes these, though its schema does not say so
    return [tensor for name in names for tensor in tensors_in(given.get(name))]


@cache
def _never_writes(func: Any) -> bool:
    arguments = func._schema.arguments
    return not any(x.name == "training" or (x.alias_info is not None and x.alias_info.is_write) for x in arguments)
