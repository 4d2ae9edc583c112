"""`varuna.log`: values of the script's own, such as an accuracy, beside the loss of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import SupportsFloat

import structlog

from varuna.diagnostics.user_code import user_code
from varuna_proto.bounds import MOST_LOGGED_NAMES, MOST_STEP, logged_name_flaw

__all__ = ["SCRIPT_VALUES", "ScriptValues", "log"]

_log = structlog.get_logger("varuna")

SendValues = Callable[[int, Mapping[str, float]], None]
"""Takes a step and values by name."""


class ScriptValues:
    """Checks what the script logs and passes it on."""

    def __init__(self) -> None:
        self._receivers: tuple[SendValues, ...] | None = None
        self._names: set[str] = set()
        self._warned: set[str] = set()

    def send_to(self, *receivers: SendValues) -> None:
        """From now on values go to these."""
        self._receivers = receivers

    def log_values(self, values: Mapping[str, SupportsFloat], step: int) -> None:
        if self._receivers is None:
            raise RuntimeError(f"log() at {user_code()}: call it after Varuna(model, ...), which knows the job")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_STEP:
            raise ValueError(f"log(…, {step!r}) at {user_code()}: a step is a whole number from 0 to {MOST_STEP}")
        finite = {}
        for name, value in values.items():
            number = self._check_value(name, value)
            if number is not None:
                finite[name] = number
        if finite:
            for send in self._receivers:
                send(step, finite)

    def _check_value(self, name: str, value: SupportsFloat) -> float | None:
        """The value; None: it is left out, with one line in the log for each name."""
        flaw = logged_name_flaw(name) if isinstance(name, str) else "is no text"
        if flaw is not None:
            raise ValueError(f"log() at {user_code()}: the name {name!r} {flaw}: give another")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements raises RuntimeError
            kind = type(value).__name__
            raise TypeError(
                f"log() at {user_code()}: {name!r} is a {kind}: give a number, or a tensor with one element"
            ) from error
        if not math.isfinite(number):
            self._warn_once(name, f"varuna.log leaves out {name!r}, because it is {number:g}")
            return None
        if name not in self._names and len(self._names) >= MOST_LOGGED_NAMES:
            self._warn_once(name, f"varuna.log leaves out {name!r}: a job may log under {MOST_LOGGED_NAMES} names")
            return None
        self._names.add(name)
        return number

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned and len(self._warned) < MOST_LOGGED_NAMES:
            self._warned.add(name)
            _log.warning(text, at=user_code())


SCRIPT_VALUES = ScriptValues()
"""Of this process. `varuna.log` is a function because a script logs from places that know no model."""


def log(values: Mapping[str, SupportsFloat], step: int) -> None:
    """Logs values of the script's own, by name, at a step of training: `varuna.log({"accuracy": 0.9}, step)`.

    The manager keeps them beside the losses: `varuna metrics`, the REST API, and with `VARUNA_TENSORBOARD` TensorBoard
    show them. Any rank may call it, after `Varuna(model, ...)`; no other rank has to. If several ranks log a name at
    a step, the value of the lowest rank counts, and of its calls the last. A step that is done again in a later
    generation replaces what the earlier ones logged. In a plain process without TensorBoard it only checks the values.

    Args:
        values: at most 64 names in a job, of at most 100 characters each; a value is a number, or a tensor with one
            element. One that is not finite is left out, with a line in the log.
        step: a whole number from 0, the number of steps that training has done, say.

    Raises:
        ValueError, TypeError: a name, a value or the step is of no use.
        RuntimeError: there is no Varuna yet.
    """
    SCRIPT_VALUES.log_values(values, step)
