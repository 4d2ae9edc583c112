"""Events on CUDA devices."""

from __future__ import annotations

import torch

__all__ = ["record_event"]


def record_event(timed: bool = False) -> torch.cuda.Event:
    """A CUDA event at the end of the work that the current stream has now."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event
