"""Forwards of modules that a stage has replaced, and the ones that they had before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["ForwardReplacements"]


class ForwardReplacements:
    """The replaced forwards of one module tree."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    @contextmanager
    def recording_changes(self, model: nn.Module) -> Iterator[None]:
        """Records the forwards that other code replaces in the block."""
        forwards = [(module, module.__dict__.get("forward")) for module in model.modules()]
        yield
        self._before += [(module, old) for module, old in forwards if module.__dict__.get("forward") is not old]

    def restore_forwards(self) -> None:
        """Gives all modules the forwards that they had."""
        for module, forward in reversed(self._before):
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
        self._before.clear()
