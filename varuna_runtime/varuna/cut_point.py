"""Cut-points: the places where a model may be cut into pipeline stages.

A `CutPoint` does not know the pipeline. It calls the observer of the running `forward` (the dry run, or a stage) and
returns what the observer returns. The observer is in a context variable and not in the module tree, because users may
keep their cut-points in plain Python lists.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor, nn

__all__ = ["CutPoint"]


class PassObserver(Protocol):
    """The object that runs the user's forward and is called at each cut-point."""

    def cut_point_passed(self, cut_point: CutPoint, activation: Tensor) -> Tensor:
        """Called at each cut-point, in the order of the forward; returns what the cut-point returns."""
        ...


_observer: ContextVar[PassObserver | None] = ContextVar("varuna_pass_observer", default=None)


def current_observer() -> PassObserver | None:
    """The observer of the forward that runs in this thread; None outside of Varuna."""
    return _observer.get()


class CutPoint(nn.Module):
    """A place where the model may be cut: call it on the activation there, once per forward.

    The activation is one tensor whose first dimension is the batch. Outside Varuna, and inside a stage, a cut-point is
    the identity. It has no parameters, so models with and without it share checkpoints.
    """

    again: Callable[[Tensor], Tensor] | None = None
    """Set by a stage: called when activation checkpointing passes the cut-point again, during a backward. It is an
    attribute because that may happen in a thread of autograd, which has no observer."""

    def forward(self, activation: Tensor) -> Tensor:
        observer = _observer.get()
        if observer is not None:
            return observer.cut_point_passed(self, activation)
        return activation if self.again is None else self.again(activation)

    @property
    def is_identity(self) -> bool:
        """Whether this call of the cut-point would have no observer."""
        return _observer.get() is None and self.again is None


class observe_cut_points:  # noqa: N801  # reads as a statement; a class, because a generator adds frames to each forward
    """Calls `observer` at every cut-point that this thread passes inside the block."""

    def __init__(self, observer: PassObserver) -> None:
        self._observer = observer

    def __enter__(self) -> None:
        self._token = _observer.set(self._observer)

    def __exit__(self, *raised: object) -> None:
        _observer.reset(self._token)
