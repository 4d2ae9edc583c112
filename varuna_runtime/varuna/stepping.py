"""One update per batch, whoever calls `optimizer.step()`, and nothing that looks like one but is none.

`Varuna.step` steps the user's optimizer itself. Scripts for earlier Varuna step it too, right after; a second update
from the same gradients would train something else, without a word. So would a script that clips the gradients after
`step`, as loops of plain PyTorch do before theirs: the optimizer has stepped by then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import FrameType, MethodType
from typing import Any

import structlog
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from varuna.optim import is_stepping, stepping
from varuna.optimizers import renew_placeholders
from varuna.places import users_code

__all__ = ["GradientsLeft", "refuse_clipping", "step_optimizers", "take_over_steps"]

_log = structlog.get_logger("varuna")

_TAKEN_OVER = "_varuna_takes_the_steps"

_INSTEAD = (
    "clip with step(inputs, clip_grad_max_norm=…), which bounds the norm over all stages; leave out GradScaler "
    "(fp16=True scales the loss); what changes gradients tensor by tensor belongs into the optimizer"
)


def take_over_steps(optimizer: Optimizer, at_scripts_call: Callable[[], bool] = lambda: False) -> None:
    """From now on `optimizer.step()` does what it does only inside `step_optimizers`.

    `at_scripts_call` is called instead when the script calls it, and returns whether that was of use.

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
        if is_stepping():
            return own_step(*args, **kwargs)
        if not at_scripts_call() and not said:
            said = True
            _log.info("the script's own optimizer.step() is left out: Varuna.step() has stepped the optimizer")
        return None

    setattr(step, _TAKEN_OVER, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def step_optimizers(optimizers: Sequence[Optimizer], gradient_norm: float) -> None:
    """Steps them in their order: `step` as the user's object has it now, with the hooks and the schedulers' wrapping.

    `gradient_norm`: of the whole model's gradient as it is now, for optimizers that ask.
    """
    renew_placeholders(optimizers)
    with stepping(gradient_norm):
        for optimizer in optimizers:
            optimizer.step()


def refuse_clipping() -> None:
    """Called where the stage's parameters are handed out.

    Raises RuntimeError when it is one of torch's clipping functions that takes them, which would clip by the norm of
    one stage, after the optimizer has stepped.
    """
    frame: FrameType | None = sys._getframe(1)
    name = ""
    for _ in range(_CALLERS):
        if frame is not None and frame.f_code.co_filename == clip_grad.__file__:
            own = frame.f_code.co_name
            name = own if own.startswith("clip") else name or own  # and no wrapper's or comprehension's
        frame = frame and frame.f_back
    if name:
        raise RuntimeError(
            f"{name} at {users_code()}: a stage has a part of the gradients only, and step() has stepped the optimizer "
            f"with them already. Instead, {_INSTEAD}"
        )


_CALLERS = 6
"""So far out: `parameters()`, a comprehension, and decorators lie between."""


class GradientsLeft:
    """The averaged gradients that a step left in `.grad`, for the script to read and not to change."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Tensor, int]] = []
        self._place = ""

    def note(self, parameters: Iterable[Tensor]) -> None:
        """At the end of a step."""
        self._left = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        self._place = users_code()

    def check(self) -> bool:
        """At the beginning of the next: whether the script has set them to None or zeros.

        Raises RuntimeError when they were changed to anything else.
        """
        dropped = False
        for parameter, gradient, version in self._left:
            now = parameter.grad
            if now is not None and now is gradient and now._version == version:
                continue
            dropped = True
            if now is not None and bool(now.any()):
                raise RuntimeError(
                    f"the gradients were changed between step() at {self._place} and step() at {users_code()} (by "
                    "clip_grad_norm_, a GradScaler, or by hand): that has no effect, for step() has stepped the "
                    f"optimizer with them already. Instead, {_INSTEAD}"
                )
        self._left = []
        return dropped
