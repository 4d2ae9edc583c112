"""The state of a script's optimizers that has not come yet: whoever reads it waits for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["AwaitedStates"]


class AwaitedStates:
    """Holds the place of the optimizers' states until `release`.

    A script may look into them at any time: whatever it does with one waits for it. A step that comes first does not.
    """

    def __init__(self, optimizers: Sequence[Optimizer], wait: Callable[[], None]) -> None:
        """`wait`: returns when `release` has been called and the state is there. From any thread of the script."""
        self._before = [(optimizer, optimizer.state) for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.state = _AwaitedState(optimizer, wait)

    def release(self) -> None:
        """Gives the optimizers back what they had, for the state to be put there."""
        for optimizer, state in self._before:
            optimizer.state = state


class _AwaitedState(defaultdict[Any, Any]):
    """Empty itself: it does all that is done with it with the state of its optimizer, when that has come."""

    def __init__(self, optimizer: Optimizer, wait: Callable[[], None]) -> None:
        super().__init__(dict)
        self._optimizer, self._wait = optimizer, wait

    def _get_state(self) -> defaultdict[Any, Any]:
        if self._optimizer.state is self:
            self._wait()
        return self._optimizer.state


def _make_waiting(name: str) -> Callable[..., Any]:
    def method(self: _AwaitedState, *arguments: Any, **named: Any) -> Any:
        return getattr(self._get_state(), name)(*arguments, **named)

    method.__name__ = name
    return method


# Rich comparisons but these raise TypeError for any dict.
_READING = "__contains__ __copy__ __eq__ __getitem__ __iter__ __len__ __missing__ __ne__ __or__ __reduce_ex__ __repr__"
_READING += " __reversed__ __ror__ copy get items keys values"
_CHANGING = "__delitem__ __ior__ __setitem__ clear pop popitem setdefault update"
for _name in (*_READING.split(), *_CHANGING.split()):
    setattr(_AwaitedState, _name, _make_waiting(_name))
