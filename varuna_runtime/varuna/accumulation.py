"""Loops that accumulate gradients: `model.step()` for each batch, `optimizer.step()` for each fourth, say.

`Varuna.step` updates the parameters itself, so it must know before the first update whether the script does. A script
says so by `Varuna(..., accumulate=True)`, or the usual form is found in its source: a loop with `model.step(...)` and,
under `if (i + 1) % n == 0`, `optimizer.step()`. Then the script's own `optimizer.step()` makes the update, from the
mean over all steps since the last one. A loop of another form is noticed at its first late `optimizer.step()`, and
refused there.

Ranks that run the same script do the same here, so they need not agree on anything.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import structlog
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.places import is_users_file, users_code

__all__ = ["Accumulation"]

_log = structlog.get_logger("varuna")


class Accumulation:
    """The gradients since the script's last `optimizer.step()`, where that makes the updates."""

    def __init__(self, asked_for: bool) -> None:
        self.active = asked_for
        """Whether the script's `optimizer.step()` makes the updates, and not `Varuna.step`."""
        self.norm = 0.0
        """L2 norm of the whole model's accumulated gradient."""
        self.clip_max_norm: float | None = None
        """By the newest step."""
        self._looked = asked_for
        self._weight = 0.0
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._updates_of_ours = 0
        self._stepped_at = ""

    @property
    def pending(self) -> bool:
        """Whether there are gradients that no update has used yet."""
        return self._weight > 0

    def look_at_script(self, optimizers: Iterable[Optimizer]) -> None:
        """At the beginning of a step; the first one looks at the loop that it is called from."""
        if not self._looked:
            self._looked = True
            place = _find_accumulating_call(list(optimizers))
            if place is not None:
                self.active = True
                _log.info(f"the script accumulates gradients: optimizer.step() at {place} makes the updates")
        self._stepped_at = users_code()

    # One step

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before the pass: takes what was accumulated out of `.grad`."""
        self._held = [(p, p.grad) for p in parameters if p.grad is not None] if self.pending else []

    def add_held(self, factor: float) -> None:
        """After the pass, whose gradients are sums over weights times `factor`: adds what was accumulated to them."""
        for parameter, mean in self._held:
            held = mean * (self._weight * factor)
            parameter.grad = held if parameter.grad is None else parameter.grad.add_(held)

    def total_weight(self, weight: float) -> float:
        """Of what is accumulated, with a step of this weight."""
        return self._weight + weight

    def keep(self, weight: float, norm: float, clip_max_norm: float | None) -> None:
        """The step was good: `.grad` is the mean over all that is accumulated now, and `norm` its norm."""
        self._weight += weight
        self.norm, self.clip_max_norm, self._held = norm, clip_max_norm, []

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """The step is skipped: `.grad` is again what was accumulated before it."""
        for parameter in parameters:
            parameter.grad = None
        for parameter, mean in self._held:
            parameter.grad = mean
        self._held = []

    def drop(self) -> None:
        """An update has used what was accumulated, or the script does not want it any more."""
        self._weight, self._held = 0.0, []

    # Scripts that step the optimizer although `Varuna.step` has

    def note_update(self) -> None:
        """`Varuna.step` has updated the parameters."""
        self._updates_of_ours += 1

    def check_call(self) -> None:
        """The script calls `optimizer.step()`. Raises RuntimeError when it does so more seldom than it steps."""
        updates, self._updates_of_ours = self._updates_of_ours, 0
        if updates > 1:
            raise RuntimeError(
                f"optimizer.step() at {users_code()} comes after {updates} calls of step() at {self._stepped_at}, and "
                "each of them has updated the parameters: the script accumulates gradients. Give "
                "Varuna(..., accumulate=True), so that optimizer.step() makes the update, from the mean over all of "
                f"them; or take a global batch that is {updates} times as large and leave optimizer.step() out"
            )


def _find_accumulating_call(optimizers: Sequence[Optimizer]) -> str | None:
    """file:line of an `optimizer.step()` that comes only every so often in the user's loop that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            line = _line_of_accumulating_call(frame, optimizers)
            if line is not None:
                return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
        frame = frame.f_back
    return None


def _line_of_accumulating_call(frame: FrameType, optimizers: Sequence[Optimizer]) -> int | None:
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):  # no source (an interactive session), or none that stands alone
        return None
    offset = max(first, 1) - 1
    here = frame.f_lineno - offset
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.While) and loop.lineno <= here <= (loop.end_lineno or loop.lineno):
            for call in _calls_every_so_often(loop.body):
                if any(_value_of(call.func.value, frame) is optimizer for optimizer in optimizers):  # type: ignore[attr-defined]
                    return call.lineno + offset
    return None


def _calls_every_so_often(body: Sequence[ast.stmt], *, seldom: bool = False) -> Iterator[ast.Call]:
    """Calls of a method `step` that are under nothing but an `if` on a remainder."""
    for statement in body:
        if isinstance(statement, ast.If) and _is_remainder(statement.test):
            yield from _calls_every_so_often(statement.body, seldom=True)
        elif isinstance(statement, ast.With):
            yield from _calls_every_so_often(statement.body, seldom=seldom)
        elif seldom and isinstance(statement, ast.Expr | ast.Assign):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                    yield node


def _is_remainder(test: ast.expr) -> bool:
    """`(i + 1) % n == 0`, or that `or` something else."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(_is_remainder(part) for part in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return isinstance(test.operand, ast.BinOp) and isinstance(test.operand.op, ast.Mod)
    sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return any(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) for side in sides)


def _value_of(expression: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of one, stands for in the frame; None when that is not plain to see."""
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        return getattr(_value_of(expression.value, frame), "__dict__", {}).get(expression.attr)
    return None
