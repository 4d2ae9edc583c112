"""Buffers that forward writes (batch-norm statistics, counters, codebooks), while micro-batches are in flight.

Each forward works on a copy of its own, made from the values that the forward before it left. So the backward of a
micro-batch finds what its forward saved, even if later ones have written. What runs again, in a recompute or in a
backward (torch.utils.checkpoint), starts with the same values as the forward and leaves the buffers unchanged: they
change once for each micro-batch, in order, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["WrittenBuffers"]


class WrittenBuffers:
    """The written buffers of one stage. Between passes their values are in `homes`, for checkpoints and other code."""

    def __init__(self, module: nn.Module, homes: Mapping[str, Tensor]) -> None:
        self.homes = dict(homes)
        """By name: the tensors that the module holds now, and between passes."""
        number = {id(home): index for index, home in enumerate(homes.values())}
        self._slots: list[list[tuple[dict[str, Tensor | None], str]]] = [[] for _ in homes]
        for part in module.modules():
            for key, buffer in part._buffers.items():
                if id(buffer) in number:
                    self._slots[number[id(buffer)]].append((part._buffers, key))

    def begin_forward(self) -> list[Tensor]:
        """Called before a forward, which then works on copies. Returns the values before it, for `restore_values`."""
        before = self._values()
        self._hold([value.clone() for value in before])
        return before

    @contextmanager
    def restore_values(self, before: list[Tensor]) -> Iterator[None]:
        """A context for a recompute or a backward, in which the buffers have the values `before` that `begin_forward`
        returned. What is written in it is dropped."""
        newest = self._values()
        self._hold([value.clone() for value in before])
        try:
            yield
        finally:
            self._hold(newest)

    def write_back(self) -> None:
        """Copies the values to `homes`, at the end of a pass."""
        values, homes = self._values(), list(self.homes.values())
        with torch.no_grad():
            for home, value in zip(homes, values, strict=True):
                if home is not value:
                    home.copy_(value)
        self._hold(homes)

    def discard_writes(self) -> None:
        """Drops what the pass wrote, instead of `write_back`."""
        self._hold([*self.homes.values()])

    def _values(self) -> list[Tensor]:
        held = [slots[0][0][slots[0][1]] for slots in self._slots]
        return [value for value in held if value is not None]

    def _hold(self, values: list[Tensor]) -> None:
        for value, slots in zip(values, self._slots, strict=True):
            for buffers, key in slots:
                buffers[key] = value
