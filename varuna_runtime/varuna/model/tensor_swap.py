"""The tensors that a stage's modules hold: some in a pass, others between passes, when the script may use them.

In a pass the modules hold the tensors that the stage computes with: its own on its device, and placeholders for those
of other stages. Between passes they hold what the script sees by the same names: the parameters that the optimizer
steps (with `offload_optimizer` these are on the host), and `meta` tensors in place of other stages' tensors. Writing to
a `meta` tensor has no effect and reading it raises. So a line that changes a layer is right on every rank: it takes
effect on the rank that has the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition import Stage
from varuna.partition.modules.special_parameters import parameter_like, refuse_late_hooks

__all__ = ["TensorSwap"]


@dataclass(slots=True)
class _TensorSlot:
    """One place in a module that holds a parameter or a buffer."""

    name: str
    entries: dict[str, Any]
    key: str
    in_pass: Tensor
    between: Tensor


@dataclass(frozen=True, slots=True)
class _ModuleSnapshot:
    """A module, and its contents when the model was wrapped."""

    name: str
    module: nn.Module
    children: dict[str, nn.Module | None]
    sizes: tuple[int, int]
    hooks: frozenset[int]


class TensorSwap:
    """Swaps the tensors of one stage's modules. After the constructor they hold those for the script.

    Attributes:
        module: the stage's copy of the user's model.
        parameters, buffers: those of this stage, by first name.
    """

    def __init__(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: those that the optimizer steps, by first name: the stage's own, or their copies on the host."""
        self.module = stage.module
        self._slots: list[_TensorSlot] = []
        self._fill_slots(stage, parameters)
        self._parts = [
            _ModuleSnapshot(
                name, part, dict(part._modules), (len(part._parameters), len(part._buffers)), _list_hooks(part)
            )
            for name, part in stage.module.named_modules()
        ]
        self._show_to_script()

    def _fill_slots(self, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        changed = stage.written.homes
        self.buffers = {name: x for name, x in stage.read.items() if name in stage.buffers or name not in changed}
        self._whole = stage.is_first and stage.is_last
        here: dict[int, Tensor] = {id(x): x for x in stage.read.values()}
        here |= {id(stage.parameters[name]): x for name, x in parameters.items()}
        known = {slot.name: slot.between for slot in self._slots if slot.between.is_meta}
        self._slots = list(_find_slots(stage.module, here, known))

    # Another stage in the same modules

    def hold_pass_tensors(self) -> None:
        """Before another stage is cut from the modules: they hold the tensors of passes until `follow_stage`.

        Raises RuntimeError as `use_pass_tensors` does.
        """
        self._check_changes()
        for slot in self._slots:
            slot.entries[slot.key] = slot.in_pass

    def follow_stage(
        self, stage: Stage, parameters: Mapping[str, nn.Parameter]
    ) -> list[tuple[str, weakref.ref[Tensor]]]:
        """From now on the modules hold the tensors of another stage, and those for the script.

        Returns the tensors that have no place in them any longer, with their names: whoever keeps one has a tensor that
        nothing trains.
        """
        before = {id(x): (slot.name, weakref.ref(x)) for slot in self._slots for x in (slot.in_pass, slot.between)}
        self._fill_slots(stage, parameters)
        self._show_to_script()
        present = {id(x) for slot in self._slots for x in (slot.in_pass, slot.between)}
        return [left for number, left in before.items() if number not in present]

    @contextmanager
    def use_pass_tensors(self) -> Iterator[None]:
        """Around a pass.

        Raises RuntimeError when the script has put a module or parameter into the model that nothing would train.
        """
        self._check_changes()
        for slot in self._slots:
            slot.entries[slot.key] = slot.in_pass
        try:
            yield
        finally:
            self._show_to_script()

    @contextmanager
    def change_pass_tensors(self) -> Iterator[None]:
        """Around a change of the tensors of a pass. The script still sees the same tensors."""
        self._check_changes()
        for slot in self._slots:
            slot.entries[slot.key] = slot.in_pass
        try:
            yield
            for slot in self._slots:
                slot.in_pass = slot.entries[slot.key]
        finally:
            self._show_to_script()

    def _show_to_script(self) -> None:
        for slot in self._slots:
            slot.entries[slot.key] = slot.between

    def _check_changes(self) -> None:
        for name, parameter in self.parameters.items():
            refuse_late_hooks(name, parameter)
        for part in self._parts:
            _refuse_changes(part)
            if not self._whole and _list_hooks(part.module) != part.hooks:
                _wrap_new_hooks(part)
        for slot in self._slots:
            now = slot.entries.get(slot.key)
            if now is slot.between:
                continue
            if isinstance(slot.between, nn.Parameter):
                raise RuntimeError(
                    f"parameter {slot.name} was replaced after the model was wrapped, and no optimizer would train the "
                    f"new one. Change it in place, with torch.no_grad(): model.get_parameter({slot.name!r}).copy_(new)"
                )
            if now is None or now.shape != slot.between.shape:
                raise RuntimeError(
                    f"buffer {slot.name} was replaced by {None if now is None else list(now.shape)} after the model "
                    f"was wrapped; it is {list(slot.between.shape)}. Change its size or remove it before"
                )
            if not slot.between.is_meta:
                slot.between.copy_(now)


def _find_slots(module: nn.Module, here: Mapping[int, Tensor], known: Mapping[str, Tensor]) -> Iterator[_TensorSlot]:
    """Every place of a parameter or buffer.

    `here`: what the script sees, by the id of the stage's tensor. `known`: what it has seen of other stages, by place.
    """
    elsewhere: dict[int, Tensor] = {}
    for path, part in module.named_modules():
        held: list[dict[str, Any]] = [part._parameters, part._buffers]
        for entries in held:
            for key, tensor in entries.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                between = here.get(id(tensor))
                if between is None:
                    between = elsewhere.setdefault(id(tensor), known[name] if name in known else _on_meta(tensor))
                yield _TensorSlot(name, entries, key, tensor, between)


def _on_meta(tensor: Tensor) -> Tensor:
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return parameter_like(tensor, hollow, requires_grad=False) if isinstance(tensor, nn.Parameter) else hollow


def _refuse_changes(part: _ModuleSnapshot) -> None:
    module = part.module
    for name in {**part.children, **module._modules}:
        if name not in part.children or module._modules.get(name) is not part.children[name]:
            path = f"{part.name}.{name}" if part.name else name
            raise RuntimeError(
                f"module {path} was replaced, added or removed after the model was wrapped and cut: do it before "
                "Varuna(model, …), or change its parameters in place"
            )
    if (len(module._parameters), len(module._buffers)) != part.sizes:
        raise RuntimeError(
            f"module {part.name or type(module).__name__} got or lost a parameter or buffer after the model was "
            "wrapped and cut: do it before Varuna(model, …)"
        )


def _list_hooks(module: nn.Module) -> frozenset[int]:
    return frozenset((*module._forward_hooks, *module._forward_pre_hooks))


def _wrap_new_hooks(part: _ModuleSnapshot) -> None:
    """Lets hooks that came after the dry run read activations but not change them: they may already be sent."""
    held: list[dict[int, Any]] = [part.module._forward_hooks, part.module._forward_pre_hooks]
    for hooks in held:
        for number, hook in hooks.items():
            if number not in part.hooks and not isinstance(hook, _ObservingHook):
                hooks[number] = _ObservingHook(part.name or type(part.module).__name__, hook)


@dataclass(frozen=True, slots=True)
class _ObservingHook:
    """A forward hook or forward pre-hook that may return nothing."""

    module: str
    hook: Callable[..., Any]

    def __call__(self, *args: Any) -> None:
        if self.hook(*args) is not None:
            raise RuntimeError(
                f"a forward hook on {self.module} that was registered after the model was wrapped changes an "
                "activation: register it before Varuna(model, …), so that stages send what it returns"
            )
