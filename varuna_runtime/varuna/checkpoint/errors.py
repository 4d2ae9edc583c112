"""The errors that this package raises for users."""

from __future__ import annotations

__all__ = ["CheckpointError", "HolderError", "MismatchError", "StoreError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file or state at fault."""


class MismatchError(CheckpointError):
    """A checkpoint is whole but belongs to another model or optimizer. The message names both sides."""


class StoreError(CheckpointError):
    """The store refused or did not answer (network, credentials, disk). The checkpoint itself may be sound."""


class HolderError(CheckpointError):
    """Processes that hold the state did not give it. The message names them."""

    def __init__(self, message: str, holders: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.holders = holders
        """Their ranks in the generation that they have left."""
