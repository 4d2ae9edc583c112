"""Loops that accumulate gradients: `model.step()` for each batch, but `optimizer.step()` only for each fourth, say.

`Varuna.step` updates the parameters itself, so it must know before the first update whether the script does. The script
gives `Varuna(..., accumulate=True)`, or has a loop of the usual form: `model.step(...)` and, under
`if (i + 1) % n == 0`, `optimizer.step()`. Then the script's own `optimizer.step()` makes the update, from the mean over
all steps since the last update. A loop of another form is refused at its first late `optimizer.step()`.

Ranks run the same script, so they decide alike without a message.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import structlog
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.diagnostics.user_code import is_user_file, user_code

__all__ = ["Accumulation"]

_log = structlog.get_logger("varuna")


class _ScriptStep(NamedTuple):
    """A call of `optimizer.step()` by the script."""

    place: str
    updates: int
    """How many there were by then, with its own."""


class Accumulation:
    """The gradients since the script's last `optimizer.step()`, if that makes the updates."""

    def __init__(self, is_requested: bool) -> None:
        self.is_active = is_requested
        """Whether the script's `optimizer.step()` makes the updates instead of `Varuna.step`."""
        self.norm = 0.0
        """L2 norm of the whole model's accumulated gradient."""
        self.clip_max_norm: float | None = None
        """The bound that the newest step has given."""
        self._is_inspected = is_requested
        self._weight = 0.0
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._updates = 0
        """How many there were, by `Varuna.step` or by the script's calls."""
        self._updated_by: Optimizer | None = None
        """Whose `step()` has made the newest update; None: `Varuna.step` has, or there was none."""
        self._calls: dict[int, _ScriptStep] = {}
        """The newest call of each optimizer's `step()` by the script, by the optimizer's id."""
        self._stepped_at = ""

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that await an update."""
        return self._weight > 0

    def inspect_script(self, optimizers: Iterable[Optimizer]) -> None:
        """At the beginning of a step; the first step inspects the loop that calls it."""
        if not self._is_inspected:
            self._is_inspected = True
            place = _find_accumulating_call(list(optimizers))
            if place is not None:
                self.is_active = True
                _log.info(f"the script accumulates gradients: optimizer.step() at {place} makes the updates")
        self._stepped_at = user_code()

    # One step

    def hold_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before the pass: takes the accumulated gradients out of `.grad`."""
        self._held = [(p, p.grad) for p in parameters if p.grad is not None] if self.is_pending else []

    def add_held_gradients(self, factor: float) -> None:
        """After the pass, whose gradients are weighted sums times `factor`: adds the accumulated gradients."""
        for parameter, mean in self._held:
            held = mean * (self._weight * factor)
            parameter.grad = held if parameter.grad is None else parameter.grad.add_(held)

    def total_weight(self, weight: float) -> float:
        """The weight of the accumulated gradients and of a step together."""
        return self._weight + weight

    def keep_gradients(self, weight: float, norm: float, clip_max_norm: float | None) -> None:
        """After a finite step: `.grad` is the mean over all accumulated steps, and `norm` is its norm."""
        self._weight += weight
        self.norm, self.clip_max_norm, self._held = norm, clip_max_norm, []

    def restore_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a skipped step: puts the gradients that were accumulated before it back into `.grad`."""
        for parameter in parameters:
            parameter.grad = None
        for parameter, mean in self._held:
            parameter.grad = mean
        self._held = []

    def drop_gradients(self) -> None:
        """After an update, or when the script drops the gradients."""
        self._weight, self._held = 0.0, []

    # Several optimizers: an update is one of all of them, whichever the script steps first

    def begin_update(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
        """Before the update of all `optimizers` that the script's `optimizer.step()` makes.

        Raises RuntimeError if it has not called each one's `step()` for the update before, as it steps them at
        different rates.
        """
        if self._updated_by is not None:
            for other in optimizers:
                if self._count_updates_since(other) > 0:
                    one = self._updated_by if other is optimizer else optimizer
                    self.note_script_step(optimizer)
                    raise RuntimeError(self._describe_rates(one, other, optimizers))
        self._updates += 1
        self._updated_by = optimizer

    def note_script_step(self, optimizer: Optimizer) -> None:
        """At an `optimizer.step()` of the script, after the update if it makes one."""
        self._calls[id(optimizer)] = _ScriptStep(user_code(), self._updates)

    def _count_updates_since(self, optimizer: Optimizer) -> int:
        """The updates since the script has called this optimizer's `step()`."""
        call = self._calls.get(id(optimizer))
        return self._updates - (0 if call is None else call.updates)

    def _describe_rates(self, one: Optimizer, other: Optimizer, optimizers: Sequence[Optimizer]) -> str:
        return (
            f"{self._describe_call(one, optimizers)} and {self._describe_call(other, optimizers)} are called at "
            "different rates, but each update is one of all optimizers in set_optimizer: call step() of all of them "
            "under the same condition, one after another"
        )

    def _describe_call(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> str:
        step, call = f"{type(optimizer).__name__}.step()", self._calls.get(id(optimizer))
        if sum(type(each) is type(optimizer) for each in optimizers) > 1:
            number = next(number for number, each in enumerate(optimizers, start=1) if each is optimizer)
            step += f" of optimizer {number}"
        return f"{step} (not called yet)" if call is None else f"{step} at {call.place}"

    # Scripts that step the optimizer although `Varuna.step` has

    def count_update(self) -> None:
        """`Varuna.step` has updated the parameters."""
        self._updates += 1

    def check_script_step(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
        """At an `optimizer.step()` of the script. Raises RuntimeError if several updates came before it."""
        updates = self._count_updates_since(optimizer)
        called = [other for other in optimizers if self._count_updates_since(other) < updates]
        self.note_script_step(optimizer)
        if updates > 1 and called:
            raise RuntimeError(self._describe_rates(optimizer, called[0], optimizers))
        if updates > 1:
            raise RuntimeError(
                f"optimizer.step() at {user_code()} comes after {updates} calls of step() at {self._stepped_at}, and "
                "each of them has updated the parameters, but the script accumulates gradients. Give "
                "Varuna(..., accumulate=True), so that optimizer.step() makes one update from the mean over these "
                f"steps; or take a global batch {updates} times as large and leave optimizer.step() out"
            )


def _find_accumulating_call(optimizers: Sequence[Optimizer]) -> str | None:
    """file:line of an `optimizer.step()` that the user's running loop calls only in some iterations."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            line = _find_line(frame, optimizers)
            if line is not None:
                return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
        frame = frame.f_back
    return None


def _find_source(frame: FrameType) -> tuple[Sequence[str], int]:
    """The lines of the frame's code, and the number of the first. Raises OSError.

    As `inspect.getsourcelines`, which looks through all modules for the code's: 20 ms at the first step.
    """
    code = frame.f_code
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    if not lines:
        raise OSError(f"there is no source of {code.co_filename}")
    if code.co_name == "<module>":
        return lines, 1
    return inspect.getblock(lines[code.co_firstlineno - 1 :]), code.co_firstlineno


def _find_line(frame: FrameType, optimizers: Sequence[Optimizer]) -> int | None:
    try:
        lines, first = _find_source(frame)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):  # no source (an interactive session), or a part of a statement
        return None
    offset = first - 1
    here = frame.f_lineno - offset
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.While) and loop.lineno <= here <= (loop.end_lineno or loop.lineno):
            for call in _find_conditional_steps(loop.body):
                if any(_value_of(call.func.value, frame) is optimizer for optimizer in optimizers):  # type: ignore[attr-defined]
                    return call.lineno + offset
    return None


def _find_conditional_steps(body: Sequence[ast.stmt], *, conditional: bool = False) -> Iterator[ast.Call]:
    """Calls of a method `step` whose only condition is an `if` on a remainder."""
    for statement in body:
        if isinstance(statement, ast.If) and _is_remainder(statement.test):
            yield from _find_conditional_steps(statement.body, conditional=True)
        elif isinstance(statement, ast.With):
            yield from _find_conditional_steps(statement.body, conditional=conditional)
        elif conditional and isinstance(statement, ast.Expr | ast.Assign):
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
    """The value of a name, or of an attribute of a name, in the frame; None if it cannot be read directly."""
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        return getattr(_value_of(expression.value, frame), "__dict__", {}).get(expression.attr)
    return None
