"""Gradient hooks that the user's parameters have when the model is wrapped: their stage's copies have them too.

A hook sees the gradient of one micro-batch, weighted by its share of the global batch, in the stage that computes it.
What a hook refers to of the model becomes the stage's: the module whose method it is, what a closure, a default
argument or `functools.partial` holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.errors import PartitionError
from varuna.places import place_of

__all__ = ["copy_gradient_hooks"]

_Hook = Callable[[Tensor], Tensor | None]


def copy_gradient_hooks(
    model: nn.Module, copies: Mapping[str, nn.Parameter], memo: Mapping[int, object], hollow: Mapping[int, str]
) -> None:
    """Registers on `copies`, by first name, the hooks of the parameters that they are copies of.

    Args:
        memo: by the id of what the model is made of: the stage's copy of it.
        hollow: by id: those copies of parameters that have no values here, and their names.

    Raises:
        PartitionError: a hook refers to the model in a way that cannot follow into the stage.
    """
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks
        if name not in copies or not hooks:
            continue
        copy = copies[name]
        trains = copy.requires_grad
        copy.requires_grad_(True)  # a frozen parameter has its hooks, too, for when it is trained
        for hook in hooks.values():
            copy.register_hook(_Refit(name, hook, memo, hollow).hook())  # type: ignore[no-untyped-call]
        copy.requires_grad_(trains)


class _Refit:
    """One hook, made to refer to the stage's copies."""

    def __init__(self, parameter: str, hook: _Hook, memo: Mapping[int, object], hollow: Mapping[int, str]) -> None:
        self._about = f"a gradient hook on {parameter} ({place_of(hook)})"
        self._hook, self._memo, self._hollow = hook, memo, hollow
        self._modules: list[nn.Module] = []

    def hook(self) -> _Hook:
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
        """`value` itself, or its like with the stage's tensors and modules."""
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
        """A cell of its own only where it must differ: what a hook counts in `nonlocal` names stays the script's."""
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
        """Raises for an object or container that keeps parts of the model: those are of the original."""
        if isinstance(holder, dict):
            inside: Collection[Any] = holder.values()
        elif isinstance(holder, list | tuple | set):
            inside = holder
        else:
            inside = getattr(holder, "__dict__", {}).values()
        for each in inside:
            if isinstance(each, nn.Module | Tensor) and id(each) in self._memo:
                raise PartitionError(
                    f"{self._about} keeps a part of the model in a {type(holder).__name__}, where it stays the "
                    "original's, which is not trained: register the hook after wrapping, on "
                    "model.get_parameter(name) of the Varuna object"
                )


@contextmanager
def _on_meta(slots: list[tuple[dict[str, Any], str, Tensor]]) -> Iterator[None]:
    """In the block these parameters are on meta, where reading them raises."""
    before = [entries[key] for entries, key, _ in slots]
    for entries, key, tensor in slots:
        hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        entries[key] = nn.Parameter(hollow, requires_grad=False)
    try:
        yield
    finally:
        for (entries, key, _), held in zip(slots, before, strict=True):
            entries[key] = held
