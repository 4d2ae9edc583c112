"""Lets the agent request the stacks of this process's threads when it hangs. Costs nothing until then."""

from __future__ import annotations

import faulthandler
import os

__all__ = ["register_stack_signal"]


def register_stack_signal() -> None:
    """Registers the signal if the agent started this process through a shell (VARUNA_STACKS is `signal:descriptor`).

    A worker that is forked from a warmed process has registered it before its script starts.
    """
    number, separator, descriptor = os.environ.get("VARUNA_STACKS", "").partition(":")
    if separator and number.isdecimal() and descriptor.isdecimal() and int(number):
        faulthandler.register(int(number), int(descriptor))
