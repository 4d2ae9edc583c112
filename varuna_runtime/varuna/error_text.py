"""What to tell of an error that another library raised."""

from __future__ import annotations

__all__ = ["first_line"]


def first_line(error: BaseException) -> str:
    """The first line of its text, which for errors of gloo and of stores is all there is to know; else its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
