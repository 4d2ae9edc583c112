"""Copies between a CUDA device and pinned host memory that run beside the computing.

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

from varuna.devices.cuda_events import record_event

__all__ = ["CopyStream"]


class CopyStream:
    """The stream for the copies of one link; on a CPU there is nothing to copy."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Contiguous copies in host memory (the tensors themselves if they already are).

        The copies are complete after the event, or at once without one. The tensors must not change before.
        """
        device = next((t.device for t in tensors if t.is_cuda), None)
        if device is None:
            return [t.detach().contiguous() for t in tensors], None
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        stream = self._on(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for to, tensor in zip(host, tensors, strict=True):
                to.copy_(tensor.detach(), non_blocking=True)
                if tensor.is_cuda:
                    tensor.detach().record_stream(stream)
            return host, record_event()

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies on `device`, which ops launched next may use; the tensors themselves on a CPU."""
        if device.type != "cuda":
            return list(tensors)
        stream = self._on(device)
        with torch.cuda.stream(stream):
            copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for copy in copies:
            copy.record_stream(computing)
        return copies

    def _on(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream = stream
        return self._stream
