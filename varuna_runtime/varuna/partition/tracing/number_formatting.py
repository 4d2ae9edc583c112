"""Numbers in text during a dry run: `self.experts[f"expert_{index}"]` with a tensor for an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["KnownValueFormatting"]


class KnownValueFormatting(TorchFunctionMode):
    """Formats scalars by their values where the dry run knows them, and as fake tensors otherwise."""

    def __init__(self, knows_value: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._knows_value = knows_value

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__format__ and args[0].dim() == 0 and self._knows_value(args[0]):
            return format(args[0].item(), args[1])
        return func(*args, **(kwargs or {}))
