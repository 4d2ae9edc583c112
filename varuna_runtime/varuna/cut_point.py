"""Cut-points: the places where a model may be cut into pipeline stages.

A `CutPoint` knows nothing of the pipeline. It tells whoever observes the running `forward` (the dry run, or a stage)
that it was passed, and returns what it is told to. The observer is found through a context variable and not through the
module tree, because users keep their cut-points in plain Python lists too (the API documentation does).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor, nn

__all__ = ["CutPoint"]


class PassObserver(Protocol):
    """Whoever runs the user's forward and wants to know of cut-points passed."""

    def cut_point_passed(self, cut_point: CutPoint, activation: Tensor) -> Tensor:
        """Called at each cut-point, in the order of the forward; returns what the cut-point returns."""
        ...


_observer: ContextVar[PassObserver | None] = ContextVar("varuna_pass_observer", default=None)


def current_observer() -> PassObserver | None:
    """Whoever runs the user's forward in this thread; None outside of Varuna."""
    return _observer.get()


class CutPoint(nn.Module):
    """A place where the model may be cut: call it on the activation there, once per forward.

    The activation is one tensor whose first dimension is the batch. Outside Varuna, and at cut-points that are no stage
    boundary, it is the identity. It has no parameters, so models with and without it share checkpoints.
    """

    again: Callable[[Tensor], Tensor] | None = None
    """Set by a stage: what to do when activation checkpointing passes the cut-point again, during a backward. An
    attribute, since that may be in a thread of autograd's, which has no observer."""

    def forward(self, activation: Tensor) -> Tensor:
        observer = _observer.get()
        if observer is not None:
            return observer.cut_point_passed(self, activation)
        return activation if self.again is None else self.again(activation)

    @property
    def is_identity(self) -> bool:
        """Whether nobody wants to know of it, here and now."""
        return _observer.get() is None and self.again is None


class observing:  # noqa: N801  # reads as a statement; a class, since a generator's frames would add to each forward
    """Tell `observer` of every cut-point that this thread passes inside the block."""

    def __init__(self, observer: PassObserver) -> None:
        self._observer = observer

    def __enter__(self) -> None:
        self._token = _observer.set(self._observer)

    def __exit__(self, *raised: object) -> None:
        _observer.reset(self._token)
