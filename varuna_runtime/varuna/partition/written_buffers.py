"""Buffers that forward writes (batch-norm statistics, counters, codebooks), while micro-batches are in flight.

Each forward works on a copy of its own, made of what the forward before it left. So the backward of a micro-batch finds
what its forward saved, whatever later ones have written, and a recompute begins with the values that its forward began
with and leaves no trace: the buffers change once for each micro-batch, in their order, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["WrittenBuffers"]


class WrittenBuffers:
    """Those of one stage's module. Between passes their values are in `homes`, which others read and load."""

    def __init__(self, module: nn.Module, homes: Mapping[str, Tensor]) -> None:
        self.homes = dict(homes)
        """By name: the tensors that the module holds now, and between passes."""
        number = {id(home): index for index, home in enumerate(homes.values())}
        self._slots: list[list[tuple[dict[str, Tensor | None], str]]] = [[] for _ in homes]
        for part in module.modules():
            for key, buffer in part._buffers.items():
                if id(buffer) in number:
                    self._slots[number[id(buffer)]].append((part._buffers, key))

    def next_forward(self) -> list[Tensor]:
        """Call it before a forward, which then works on copies. Returns the values before it, for `as_before`."""
        before = self._values()
        self._hold([value.clone() for value in before])
        return before

    @contextmanager
    def as_before(self, before: list[Tensor]) -> Iterator[None]:
        """For around a recompute; `before` is what `next_forward` returned."""
        newest = self._values()
        self._hold([value.clone() for value in before])
        try:
            yield
        finally:
            self._hold(newest)

    def settle(self) -> None:
        """At the end of a pass, when no backward is left."""
        values, homes = self._values(), list(self.homes.values())
        with torch.no_grad():
            for home, value in zip(homes, values, strict=True):
                if home is not value:
                    home.copy_(value)
        self._hold(homes)

    def drop(self) -> None:
        """Instead of `settle`: what the pass wrote is forgotten."""
        self._hold([*self.homes.values()])

    def _values(self) -> list[Tensor]:
        held = [slots[0][0][slots[0][1]] for slots in self._slots]
        return [value for value in held if value is not None]

    def _hold(self, values: list[Tensor]) -> None:
        for value, slots in zip(values, self._slots, strict=True):
            for buffers, key in slots:
                buffers[key] = value
