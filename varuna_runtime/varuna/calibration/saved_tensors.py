"""The memory of activations: the tensors that autograd saves for backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["SavedTensors"]


class SavedTensors:
    """Records what autograd saves for backward, without tensors that are in memory anyway."""

    def __init__(self, anyway: Sequence[Tensor]) -> None:
        self._anyway = {tensor.untyped_storage().data_ptr() for tensor in anyway}
        self._saved: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._saved.values())

    @property
    def tensors(self) -> list[Tensor]:
        """They are kept alive so that no storage address is used twice."""
        return list(self._saved.values())

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Counts tensors that stay in memory though autograd may not save them."""
        for tensor in tensors:
            self._record(tensor)

    @contextmanager
    def record_saves(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._record, lambda tensor: tensor):
            yield

    def _record(self, tensor: Tensor) -> Tensor:
        saved = tensor.detach()  # the tensor itself would be a reference cycle where an operation keeps its output
        address = tensor.untyped_storage().data_ptr()
        if address not in self._anyway:
            self._saved[address] = saved
        return saved
