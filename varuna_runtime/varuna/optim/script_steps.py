"""One update per batch, even if the script calls `optimizer.step()` or clips gradients itself.

`Varuna.step` steps the user's optimizer. Scripts for earlier versions of Varuna step it again; a second update from the
same gradients would silently train something else. Loops of plain PyTorch clip gradients before their own
`optimizer.step()`; after `Varuna.step` this has no effect, because the optimizer has already stepped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FrameType, MethodType
from typing import Any

import structlog
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import LBFGS, Optimizer, lr_scheduler
from torch.optim import optimizer as optimizer_module

from varuna.diagnostics.user_code import user_code
from varuna.optim.host_parameters import ArrivingGradients
from varuna.optim.optimizers import renew_placeholders
from varuna.optim.reduction import is_stepping, stepping

__all__ = ["ReadOnlyGradients", "refuse_clipping", "step_optimizers", "take_over_steps"]

_log = structlog.get_logger("varuna")

_TAKEN_OVER = "_varuna_takes_the_steps"

_INSTEAD = (
    "clip with step(inputs, clip_grad_max_norm=…), which bounds the norm over all stages; leave out GradScaler "
    "(fp16=True scales the loss); put changes of single tensors' gradients into the optimizer"
)


def take_over_steps(optimizer: Optimizer, on_script_step: Callable[[Optimizer], bool] = lambda _: False) -> None:
    """From now on `optimizer.step()` makes an update only inside `step_optimizers`.

    When the script calls it, `on_script_step` runs instead with the optimizer, and returns whether the call had an
    effect.

    The object stays the user's own. Its method is replaced on the object, as by PyTorch's learning-rate schedulers,
    which may come before or after this.
    """
    own_step = optimizer.step
    if hasattr(own_step, _TAKEN_OVER):
        return
    is_logged = False

    @wraps(own_step)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_logged
        if is_stepping():
            return own_step(*args, **kwargs)
        if not on_script_step(optimizer) and not is_logged:
            is_logged = True
            _log.info("the script's own optimizer.step() has no effect: Varuna.step() has stepped the optimizer")
        return None

    setattr(step, _TAKEN_OVER, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def step_optimizers(
    optimizers: Sequence[Optimizer], gradient_norm: float, arriving: Sequence[ArrivingGradients] = ()
) -> None:
    """Steps the optimizers in their order, with their hooks and the wrappers of schedulers.

    `gradient_norm`: of the whole model's present gradient, for `global_gradient_norm`. `arriving`: gradients that are
    still on their way. PyTorch's own optimizers step the parameters of one part while the next one comes.
    """
    renew_placeholders(optimizers)
    with stepping(gradient_norm):
        if len(arriving) > 1 and all(map(steps_each_by_itself, optimizers)):
            for part in arriving[:-1]:
                part.wait()
                for optimizer in optimizers:
                    with _having_only(optimizer, {id(parameter) for parameter in part.parameters}) as has_some:
                        if has_some:
                            type(optimizer).step(optimizer)
            arriving[-1].wait()
            stepped = {id(parameter) for part in arriving[:-1] for parameter in part.parameters}
            for optimizer in optimizers:
                with _having_only(optimizer, _list_ids(optimizer) - stepped):
                    optimizer.step()
        else:
            for part in arriving:
                part.wait()
            for optimizer in optimizers:
                optimizer.step()


def steps_each_by_itself(optimizer: Optimizer) -> bool:
    """Whether several calls of `step`, each for some of the parameters, do what one call for all of them does.

    So it is with PyTorch's own optimizers, unless the script has added something to their step: they keep all that they
    count by parameter. LBFGS goes through all parameters at once.
    """
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim.") or kind is LBFGS:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if optimizer_module._global_optimizer_pre_hooks or optimizer_module._global_optimizer_post_hooks:
        return False
    step: Any = optimizer.step
    while (step := getattr(step, "__func__", step)) is not kind.step:  # ours, and those of schedulers, add nothing
        if step.__code__.co_filename not in (__file__, lr_scheduler.__file__) or not hasattr(step, "__wrapped__"):
            return False
        step = step.__wrapped__
    return True


def _list_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


@contextmanager
def _having_only(optimizer: Optimizer, ids: Collection[int]) -> Iterator[bool]:
    """The optimizer has no other parameters in the block; yields whether it has any."""
    groups = optimizer.param_groups
    members = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(optimizer.param_groups)
    finally:
        for group, before in zip(groups, members, strict=True):
            group["params"] = before
        optimizer.param_groups = groups


def refuse_clipping() -> None:
    """Called before the stage's parameters are returned to a caller.

    Raises RuntimeError when the caller is one of torch's clipping functions, because it would clip by the norm of one
    stage, after the optimizer has stepped.
    """
    frame: FrameType | None = sys._getframe(1)
    name = ""
    for _ in range(_CALLER_DEPTH):
        if frame is not None and frame.f_code.co_filename == clip_grad.__file__:
            own = frame.f_code.co_name
            name = own if own.startswith("clip") else name or own  # not that of a wrapper or comprehension
        frame = frame and frame.f_back
    if name:
        raise RuntimeError(
            f"{name} at {user_code()}: a stage has only a part of the gradients, and step() has already stepped the "
            f"optimizer with them. Instead, {_INSTEAD}"
        )


_CALLER_DEPTH = 6
"""The frames to search: `parameters()`, a comprehension, and decorators lie between."""


class ReadOnlyGradients:
    """The averaged gradients that a step leaves in `.grad`. The script may read them, but not change them."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Tensor, int]] | None = None
        self._place = ""

    def record_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Records the gradients at the end of a step."""
        self._left = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        self._place = user_code()

    def check_gradients(self) -> list[Tensor] | None:
        """At the beginning of the next step: returns the parameters whose gradients the script has not set to None or
        zeros; None: they were checked before.

        Raises RuntimeError when it has changed them to anything else.
        """
        if self._left is None:
            return None
        kept = []
        for parameter, gradient, version in self._left:
            now = parameter.grad
            if now is not None and now is gradient and now._version == version:
                kept.append(parameter)
            elif now is not None and bool(now.any()):
                raise RuntimeError(
                    f"the gradients were changed between step() at {self._place} and step() at {user_code()} (by "
                    "clip_grad_norm_, a GradScaler, or by hand): this has no effect, because step() has already "
                    f"stepped the optimizer with them. Instead, {_INSTEAD}"
                )
        self._left = None
        return kept
