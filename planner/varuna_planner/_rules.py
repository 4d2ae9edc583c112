# mypy: disable-error-code="untyped-decorator"
"""The plain rules that compiled loops call, compiled as they stand, and a key that changes when one of them does."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from varuna_planner import memory
from varuna_planner._compiled import compiled
from varuna_planner.schedule import policies as schedule

__all__ = [
    "RULES",
    "choose",
    "choose_split",
    "code_of",
    "gradient_sets",
    "input_sets",
    "most_in_flight",
    "pass_bytes",
    "stage_bytes",
    "stash_cap",
]

choose = compiled()(schedule.choose)
choose_split = compiled()(schedule.choose_split)
most_in_flight = compiled()(schedule.most_in_flight)
stash_cap = compiled()(schedule.stash_cap)
input_sets = compiled()(memory.input_sets)
gradient_sets = compiled()(memory.gradient_sets)
pass_bytes = compiled()(memory.pass_bytes)
stage_bytes = compiled()(memory.stage_bytes)


def _fingerprint(*functions: Callable[..., Any]) -> int:
    """Changes when the functions do, or the constants that they use."""

    def text(function: Callable[..., Any]) -> str:
        code = function.__code__
        used = [function.__globals__.get(name) for name in code.co_names]
        constants = [value for value in used if isinstance(value, int | float | str)]  # others print their addresses
        return repr(
            (code.co_code, code.co_names, constants, [c for c in code.co_consts if not isinstance(c, CodeType)])
        )

    return zlib.crc32("".join(text(function) for function in functions).encode())


RULES = _fingerprint(
    schedule.choose,
    schedule.choose_split,
    schedule.most_in_flight,
    schedule.stash_cap,
    memory.input_sets,
    memory.gradient_sets,
    memory.pass_bytes,
    memory.stage_bytes,
)
"""For a closure to use: numba's cache notices edits of a function's own file only, but its key includes closures."""


def code_of(*modules: ModuleType) -> int:
    """The same for a cached function that calls compiled functions of other modules: changes when one of those does."""
    called = [function for module in modules for function in vars(module).values() if hasattr(function, "py_func")]
    return _fingerprint(*(function.py_func for function in called)) ^ RULES
