"""The gradient hooks of the user's parameters, copied to the stage's parameters when the model is wrapped.

A hook gets the gradient of one micro-batch, weighted by its share of the global batch, in the stage that computes it.
References of a hook to parts of the model are changed to the stage's copies: the module of a bound method, and what a
closure, a default argument or `functools.partial` holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from varuna.diagnostics.user_code import definition_place
from varuna.partition.errors import PartitionError

__all__ = ["copy_gradient_hooks"]

_Hook = Callable[[Tensor], Tensor | None]


def copy_gradient_hooks(
    model: nn.Module, copies: Mapping[str, nn.Parameter], memo: Mapping[int, object], hollow: Mapping[int, str]
) -> None:
    """Registers on `copies`, by first name, the hooks of the parameters that they are copies of.

    Args:
        memo: the stage's copies of the model's parts, by the ids of the originals.
        hollow: the names of parameters without values here, by the ids of their copies.

    Raises:
        PartitionError: a hook refers to the model in a way that cannot follow into the stage.
    """
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks
        if name not in copies or not hooks:
            continue
        copy = copies[name]
        trains = copy.requires_grad
        copy.requires_grad_(True)  # a frozen parameter keeps its hooks, in case it is trained later
        for hook in hooks.values():
            copy.register_hook(_HookRefitter(name, hook, memo, hollow).make_hook())  # type: ignore[no-untyped-call]
        copy.requires_grad_(trains)


class _HookRefitter:
    """Makes a copy of one hook that refers to the stage's copies."""

    def __init__(self, parameter: str, hook: _Hook, memo: Mapping[int, object], hollow: Mapping[int, str]) -> None:
        self._about = f"a gradient hook on {parameter} ({definition_place(hook)})"
        self._hook, self._memo, self._hollow = hook, memo, hollow
        self._modules: list[nn.Module] = []

    def make_hook(self) -> _Hook:
        refitted: _Hook = self._refit(self._hook)
        slots: list[tuple[dict[str, Any], str, Tensor]] = [
            (part._parameters, key, tensor)
            for module in self._modules
            for part in module.modules()
            for key, tensor in part._parameters.items()
            if tensor is not None and id(tensor) in self._hollow
        ]
        if not slots:
            return refitted

        def watched(gradient: Tensor) -> Tensor | None:
            try:
                with _on_meta(slots):
                    changed = refitted(gradient)
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error):
                    raise
                raise self._reads_elsewhere() from error
            if changed is not None and changed.is_meta:
                raise self._reads_elsewhere()
            return changed

        return watched

    def _reads_elsewhere(self) -> PartitionError:
        return PartitionError(
            f"{self._about} uses a parameter of another stage, which has no values here: compute with it in forward, "
            "or leave the model whole (cut_points=0)"
        )

    def _refit(self, value: Any) -> Any:
        """`value` itself, or a copy with the stage's tensors and modules."""
        if isinstance(value, nn.Module | Tensor):
            return self._own(value)
        if isinstance(value, MethodType):
            if isinstance(value.__self__, nn.Module):
                return MethodType(value.__func__, self._own(value.__self__))
            self._refuse_inside(value.__self__)
        elif isinstance(value, functools.partial):
            given = [self._refit(each) for each in value.args]
            by_name = {key: self._refit(each) for key, each in value.keywords.items()}
            return functools.partial(self._refit(value.func), *given, **by_name)
        elif isinstance(value, FunctionType):
            return self._refit_function(value)
        elif callable(value):
            self._refuse_inside(value)
        return value

    def _refit_function(self, function: FunctionType) -> Any:
        cells = tuple(self._refit_cell(cell) for cell in function.__closure__ or ())
        defaults = tuple(self._refit(each) for each in function.__defaults__ or ())
        same = all(a is b for a, b in zip(cells, function.__closure__ or (), strict=True))
        if same and all(a is b for a, b in zip(defaults, function.__defaults__ or (), strict=True)):
            return function
        made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        return functools.update_wrapper(made, function)

    def _refit_cell(self, cell: CellType) -> CellType:
        """A new cell only where it must differ: counts that a hook keeps in `nonlocal` names stay the script's."""
        try:
            content = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        if isinstance(content, list | tuple | dict | set):
            self._refuse_inside(content)
            return cell
        refitted = self._refit(content) if isinstance(content, nn.Module | Tensor | MethodType) else content
        return cell if refitted is content else CellType(refitted)

    def _own(self, value: nn.Module | Tensor) -> Any:
        copy = self._memo.get(id(value), value)
        if isinstance(copy, nn.Module) and copy is not value:
            self._modules.append(copy)
        if id(copy) in self._hollow:
            raise PartitionError(
                f"{self._about} uses {self._hollow[id(copy)]}, a parameter of another stage, which has no values here: "
                "compute with it in forward, or leave the model whole (cut_points=0)"
            )
        return copy

    def _refuse_inside(self, holder: Any) -> None:
        """Raises PartitionError for an object or container that keeps parts of the original model."""
        if isinstance(holder, dict):
            inside: Collection[Any] = holder.values()
        elif isinstance(holder, list | tuple | set):
            inside = holder
        else:
            inside = getattr(holder, "__dict__", {}).values()
        for each in inside:
            if isinstance(each, nn.Module | Tensor) and id(each) in self._memo:
                raise PartitionError(
                    f"{self._about} keeps a part of the original model, which is not trained, in a "
                    f"{type(holder).__name__}: register the hook after wrapping, on model.get_parameter(name) of the "
                    "Varuna object"
                )


@contextmanager
def _on_meta(slots: list[tuple[dict[str, Any], str, Tensor]]) -> Iterator[None]:
    """Puts these parameters on meta in the block, where reading them raises."""
    before = [entries[key] for entries, key, _ in slots]
    for entries, key, tensor in slots:
        hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        entries[key] = nn.Parameter(hollow, requires_grad=False)
    try:
        yield
    finally:
        for (entries, key, _), held in zip(slots, before, strict=True):
            entries[key] = held
