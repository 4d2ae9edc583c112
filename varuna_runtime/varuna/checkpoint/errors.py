"""The error that this package raises for users."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file or state at fault."""
