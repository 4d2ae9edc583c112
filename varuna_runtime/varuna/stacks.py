"""Lets the agent ask this process where its threads stand, for when it hangs. Nothing of it runs until then."""

from __future__ import annotations

import faulthandler
import os

__all__ = ["answer_the_agent"]


def answer_the_agent() -> None:
    """Where the agent started this process through a shell (VARUNA_STACKS is `signal:descriptor`); else nothing.

    A worker that is forked from a warmed process has been made ready for it before its script began.
    """
    number, separator, descriptor = os.environ.get("VARUNA_STACKS", "").partition(":")
    if separator and number.isdecimal() and descriptor.isdecimal() and int(number):
        faulthandler.register(int(number), int(descriptor))
