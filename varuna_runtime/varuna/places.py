"""Where in the user's code something happens, for messages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

__all__ = ["is_users_file", "users_code"]

_NOT_USERS_CODE = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
)


def is_users_file(file: str) -> bool:
    """Whether code of this file is neither Varuna's nor PyTorch's."""
    return not file.startswith(_NOT_USERS_CODE) and "<" not in file


def users_code() -> str:
    """file:line in function of the innermost code that runs and is neither Varuna's nor PyTorch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            name = frame.f_code.co_filename.rpartition(os.sep)[2]
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown place"
