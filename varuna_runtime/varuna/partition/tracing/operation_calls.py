"""Calls of the dispatcher's operations, and the tensors among their arguments and results.

These hold tensors alone and in lists; torch's pytree, for containers of any kind, takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["OperationCall", "replace_tensors", "storage_of", "tensors_in"]


@dataclass(frozen=True, slots=True)
class OperationCall:
    """An operation and its arguments."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    """Those among the arguments, in order."""

    def run_with(self, replacement: Callable[[Tensor], Tensor]) -> Any:
        """What the operation gives for `replacement(tensor)` instead of every tensor."""
        args, kwargs = replace_tensors((self.args, self.kwargs), replacement)
        return self.func(*args, **kwargs)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in `values`, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def replace_tensors(values: Any, replacement: Callable[[Tensor], Any]) -> Any:
    """`values` with `replacement(tensor)` instead of every tensor, called in order."""
    if isinstance(values, Tensor):
        return replacement(values)
    if isinstance(values, list):
        return [replace_tensors(value, replacement) for value in values]
    if isinstance(values, tuple):
        return tuple([replace_tensors(value, replacement) for value in values])
    if isinstance(values, dict):
        return {name: replace_tensors(value, replacement) for name, value in values.items()}
    return values


def storage_of(tensor: Tensor) -> int:
    """The identity of the memory that `tensor` has, alone or with others."""
    return int(tensor.untyped_storage()._cdata)
