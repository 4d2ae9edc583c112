"""Copies between an accelerator and pinned host memory that run beside the computing.

On the computing stream, a copy would wait for all ops launched before it, and all ops launched after it would wait for
the copy. So each link has a stream of its own, which waits only for what it copies; the copy engines of a GPU work
while it computes. Three rules make that safe:

- the copying stream waits for the op that makes the data to copy; the computing stream waits for data copied to it;
- memory that one stream allocates and another uses is recorded for the other (`record_stream`), because the allocator
  would otherwise reuse it while the other stream still reads it;
- pinned memory comes from PyTorch's caching allocator, which reuses a block when its last copy has ended; the host may
  read the copy only after the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.devices.accelerator import is_accelerator, record_event, use_stream

__all__ = ["CopyStream", "StartedCopies"]


class StartedCopies(NamedTuple):
    """Copies on a device that may still be under way."""

    copies: list[Tensor]
    ended: torch.Event | None
    """None: there was nothing to copy."""

    def take(self) -> list[Tensor]:
        """The copies, which ops launched next may use."""
        if self.ended is not None:
            computing = torch.accelerator.current_stream(self.copies[0].device)
            computing.wait_event(self.ended)
            for copy in self.copies:
                copy.record_stream(computing)
        return self.copies


class CopyStream:
    """The stream for the copies of one link or group; on a CPU there is nothing to copy."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        """Contiguous copies in host memory (the tensors themselves if they already are).

        The copies are complete after the event, or at once without one. The tensors must not change before.
        """
        device = next((t.device for t in tensors if is_accelerator(t.device)), None)
        if device is None:
            return [t.detach().contiguous() for t in tensors], None
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        stream = self._on(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with use_stream(stream):
            for to, tensor in zip(host, tensors, strict=True):
                to.copy_(tensor.detach(), non_blocking=True)
                if is_accelerator(tensor.device):
                    tensor.detach().record_stream(stream)
            return host, record_event(device)

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies on `device`, which ops launched next may use; the tensors themselves on a CPU."""
        return self.start_to_device(tensors, device).take()

    def start_to_device(self, tensors: Sequence[Tensor], device: torch.device) -> StartedCopies:
        """As `to_device`, but ops may use the copies only after `StartedCopies.take`. Others do not wait for them."""
        if not is_accelerator(device) or not tensors:
            return StartedCopies(list(tensors), None)
        with use_stream(self._on(device)):
            copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
            return StartedCopies(copies, record_event(device))

    def update_on_host(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> torch.Event:
        """Copies `values`, on one accelerator, into pinned `tensors`, which have them after the event.

        Neither may change before.
        """
        device = values[0].device
        stream = self._on(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with use_stream(stream):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value, non_blocking=True)
                value.record_stream(stream)
            return record_event(device)

    def start_update_on_device(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> torch.Event:
        """As `update_on_device`, but only ops of a stream that waits for the event see the values."""
        device = tensors[0].device
        stream = self._on(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with use_stream(stream):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value, non_blocking=True)
                tensor.record_stream(stream)
            return record_event(device)

    def update_on_device(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copies `values`, in host memory, into `tensors` on one accelerator. Ops launched next see them."""
        ended = self.start_update_on_device(tensors, values)
        torch.accelerator.current_stream(tensors[0].device).wait_event(ended)

    def _on(self, device: torch.device) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(device)
        return self._stream
