"""One update per batch, whoever calls `optimizer.step()`.

`Varuna.step` steps the user's optimizer itself. Scripts for earlier Varuna step it too, right after; a second update
from the same gradients would train something else, without a word.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import wraps
from types import MethodType
from typing import Any

import structlog
from torch.optim import Optimizer

__all__ = ["step_optimizer", "take_over_steps"]

_log = structlog.get_logger("varuna")

_TAKEN_OVER = "_varuna_takes_the_steps"

_stepping: ContextVar[bool] = ContextVar("varuna_stepping", default=False)


def take_over_steps(optimizer: Optimizer) -> None:
    """From now on `optimizer.step()` does something only inside `step_optimizer`.

    The object stays the user's own: its method is replaced on it, as PyTorch's learning-rate schedulers do, which may
    come before or after this.
    """
    own_step = optimizer.step
    if hasattr(own_step, _TAKEN_OVER):
        return
    said = False

    @wraps(own_step)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal said
        if _stepping.get():
            return own_step(*args, **kwargs)
        if not said:
            said = True
            _log.info("the script's own optimizer.step() is left out: Varuna.step() has stepped the optimizer")
        return None

    setattr(step, _TAKEN_OVER, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def step_optimizer(optimizer: Optimizer) -> None:
    """Steps it: `step` as the user's object has it now, with the hooks and the schedulers' wrapping."""
    token = _stepping.set(True)
    try:
        optimizer.step()
    finally:
        _stepping.reset(token)
