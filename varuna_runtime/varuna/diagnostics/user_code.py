"""Places in the user's code, for messages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

__all__ = ["definition_place", "is_user_file", "user_code"]

_OTHER_CODE = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
)


def is_user_file(file: str) -> bool:
    """Whether this file is neither Varuna's nor PyTorch's."""
    return not file.startswith(_OTHER_CODE) and "<" not in file


def definition_place(function: Any) -> str:
    """file:line in function where `function` is defined; the name of its type if it is no function."""
    inner = function
    while not hasattr(inner, "__code__") and hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    code = getattr(inner, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{code.co_filename.rpartition(os.sep)[2]}:{code.co_firstlineno} in {code.co_qualname}"


def user_code() -> str:
    """file:line in function of the innermost running code that is neither Varuna's nor PyTorch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            name = frame.f_code.co_filename.rpartition(os.sep)[2]
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown place"
