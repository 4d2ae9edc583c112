"""Forwards of modules that a stage has replaced, and what was there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["Rewired"]


class Rewired:
    """The replaced forwards of one module tree."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    @contextmanager
    def noting(self, model: nn.Module) -> Iterator[None]:
        """Notes what code in the block, which replaces forwards by itself, replaces."""
        forwards = [(module, module.__dict__.get("forward")) for module in model.modules()]
        yield
        self._before += [(module, old) for module, old in forwards if module.__dict__.get("forward") is not old]

    def undo(self) -> None:
        """Gives all modules the forwards that they had."""
        for module, forward in reversed(self._before):
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
        self._before.clear()
