"""What a model can do that Varuna cannot cut."""

from __future__ import annotations

__all__ = ["PartitionError"]


class PartitionError(ValueError):
    """The model cannot be partitioned as it stands; the message names the place and what to change."""
