"""The errors that this package raises for users."""

from __future__ import annotations

__all__ = ["CheckpointError", "MismatchError", "StoreError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file or state at fault."""


class MismatchError(CheckpointError):
    """A checkpoint is whole, and is not of this script's model or optimizer. The message names both sides."""


class StoreError(CheckpointError):
    """The store refused or did not answer (network, credentials, disk): this says nothing about the checkpoint."""
