"""Numbers in text during a dry run: `self.experts[f"expert_{index}"]` with a tensor for an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["FormatsKnownValues"]


class FormatsKnownValues(TorchFunctionMode):
    """Scalars whose value is known are formatted as it, as outside of a dry run; others as fake tensors are."""

    def __init__(self, known: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__format__ and args[0].dim() == 0 and self._known(args[0]):
            return format(args[0].item(), args[1])
        return func(*args, **(kwargs or {}))
