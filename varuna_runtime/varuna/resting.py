"""What a stage's modules hold between passes, when the script may look at them and change them.

In a pass they hold what the stage computes with: its own tensors on its device, and placeholders for the others'.
Between passes they hold what the script shall see by the same names: the parameters that the optimizer steps (with
`offload_optimizer` those are on the host), and for another stage's tensors ones on `meta`. There writing has no effect
and reading raises, so a line that changes a layer is right on every rank: it takes effect where the layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition import Stage
from varuna.partition.special_parameters import parameter_like, refuse_late_hooks

__all__ = ["RestingModules"]


@dataclass(slots=True)
class _Slot:
    """One place in a module that holds a parameter or a buffer."""

    name: str
    entries: dict[str, Any]
    key: str
    in_pass: Tensor
    between: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """A module, and what was in it when the model was wrapped."""

    name: str
    module: nn.Module
    children: dict[str, nn.Module | None]
    sizes: tuple[int, int]
    hooks: frozenset[int]


class RestingModules:
    """Those of one stage; between passes from now on.

    Attributes:
        module: the user's model, as this stage has it.
        parameters, buffers: what it has of it, by first names.
    """

    def __init__(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: those that the optimizer steps, by first name: the stage's own, or their masters."""
        self.module = stage.module
        self.parameters = dict(parameters)
        changed = stage.written.homes
        self.buffers = {name: x for name, x in stage.read.items() if name in stage.buffers or name not in changed}
        self._whole = stage.is_first and stage.is_last
        here: dict[int, Tensor] = {id(x): x for x in stage.read.values()}
        here |= {id(stage.parameters[name]): x for name, x in parameters.items()}
        self._slots = list(_slots_of(stage.module, here))
        self._parts = [
            _Part(name, part, dict(part._modules), (len(part._parameters), len(part._buffers)), _hooks_of(part))
            for name, part in stage.module.named_modules()
        ]
        self._rest()

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Around a pass.

        Raises RuntimeError when the script has put a module or parameter of its own into the model, which nothing
        would train.
        """
        self._check()
        for slot in self._slots:
            slot.entries[slot.key] = slot.in_pass
        try:
            yield
        finally:
            self._rest()

    @contextmanager
    def refitted(self) -> Iterator[None]:
        """Around a change of what the stage computes with. The script still sees what it saw before."""
        self._check()
        for slot in self._slots:
            slot.entries[slot.key] = slot.in_pass
        try:
            yield
            for slot in self._slots:
                slot.in_pass = slot.entries[slot.key]
        finally:
            self._rest()

    def _rest(self) -> None:
        for slot in self._slots:
            slot.entries[slot.key] = slot.between

    def _check(self) -> None:
        for name, parameter in self.parameters.items():
            refuse_late_hooks(name, parameter)
        for part in self._parts:
            _refuse_changes(part)
            if not self._whole and _hooks_of(part.module) != part.hooks:
                _watch_new_hooks(part)
        for slot in self._slots:
            now = slot.entries.get(slot.key)
            if now is slot.between:
                continue
            if isinstance(slot.between, nn.Parameter):
                raise RuntimeError(
                    f"parameter {slot.name} was replaced after the model was wrapped: no optimizer would train the new "
                    f"one. Change it in place, with torch.no_grad(): model.get_parameter({slot.name!r}).copy_(new)"
                )
            if now is None or now.shape != slot.between.shape:
                raise RuntimeError(
                    f"buffer {slot.name} was replaced by {None if now is None else list(now.shape)} after the model "
                    f"was wrapped; it is {list(slot.between.shape)}. Change its size or remove it before"
                )
            if not slot.between.is_meta:
                slot.between.copy_(now)


def _slots_of(module: nn.Module, here: Mapping[int, Tensor]) -> Iterator[_Slot]:
    """Every place of a parameter or buffer. `here`: by the id of what is there, what the script shall see of it."""
    elsewhere: dict[int, Tensor] = {}
    for path, part in module.named_modules():
        held: list[dict[str, Any]] = [part._parameters, part._buffers]
        for entries in held:
            for key, tensor in entries.items():
                if tensor is None:
                    continue
                between = here.get(id(tensor))
                if between is None:
                    between = elsewhere.setdefault(id(tensor), _on_meta(tensor))
                yield _Slot(f"{path}.{key}" if path else key, entries, key, tensor, between)


def _on_meta(tensor: Tensor) -> Tensor:
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return parameter_like(tensor, hollow, requires_grad=False) if isinstance(tensor, nn.Parameter) else hollow


def _refuse_changes(part: _Part) -> None:
    module = part.module
    for name in {**part.children, **module._modules}:
        if name not in part.children or module._modules.get(name) is not part.children[name]:
            path = f"{part.name}.{name}" if part.name else name
            raise RuntimeError(
                f"module {path} was replaced, added or removed after the model was wrapped, which has been cut by "
                "then: do it before Varuna(model, …), or change its parameters in place"
            )
    if (len(module._parameters), len(module._buffers)) != part.sizes:
        raise RuntimeError(
            f"module {part.name or type(module).__name__} got or lost a parameter or buffer after the model was "
            "wrapped, which has been cut by then: do it before Varuna(model, …)"
        )


def _hooks_of(module: nn.Module) -> frozenset[int]:
    return frozenset((*module._forward_hooks, *module._forward_pre_hooks))


def _watch_new_hooks(part: _Part) -> None:
    """A hook that came after the dry run may look at what passes, and not change it: it may be on its way already."""
    held: list[dict[int, Any]] = [part.module._forward_hooks, part.module._forward_pre_hooks]
    for hooks in held:
        for number, hook in hooks.items():
            if number not in part.hooks and not isinstance(hook, _Watched):
                hooks[number] = _Watched(part.name or type(part.module).__name__, hook)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A forward hook or forward pre-hook that may return nothing."""

    module: str
    hook: Callable[..., Any]

    def __call__(self, *args: Any) -> None:
        if self.hook(*args) is not None:
            raise RuntimeError(
                f"a forward hook on {self.module} that was registered after the model was wrapped changes what passes: "
                "register it before Varuna(model, …), so that stages send what it returns"
            )
