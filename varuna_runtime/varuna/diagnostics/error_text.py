"""The text of errors that other libraries raise."""

from __future__ import annotations

__all__ = ["first_line"]


def first_line(error: BaseException) -> str:
    """The first line of the error's text, which is enough for errors of gloo and of stores; its type without text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
