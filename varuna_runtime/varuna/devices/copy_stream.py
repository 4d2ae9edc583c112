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

import torch
from torch import Tensor

from varuna.devices.accelerator import is_accelerator, record_event, use_stream

__all__ = ["CopyStream"]


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
        if not is_accelerator(device):
            return list(tensors)
        stream = self._on(device)
        with use_stream(stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
        computing = torch.accelerator.current_stream(device)
        computing.wait_stream(stream)
        for copy in copies:
            copy.record_stream(computing)
        return copies

    def update_on_device(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copies `values`, in host memory, into `tensors` on one accelerator. Ops launched next see them."""
        device = tensors[0].device
        stream, computing = self._on(device), torch.accelerator.current_stream(device)
        stream.wait_stream(computing)
        with use_stream(stream):
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value, non_blocking=True)
                tensor.record_stream(stream)
        computing.wait_stream(stream)

    def _on(self, device: torch.device) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(device)
        return self._stream
