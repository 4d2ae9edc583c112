"""The error for models that Varuna cannot cut."""

from __future__ import annotations

__all__ = ["PartitionError"]


class PartitionError(ValueError):
    """The model cannot be cut as it stands. The message names the place and the change to make."""
