"""Kernels outside of PyTorch's dispatcher, whose outputs are declared for the dry run.

Triton kernels, extensions that read data pointers and builds of flash-attention fail on the fake tensors of a dry run.
Kernels that use `torch.library.custom_op` with `register_fake` need no declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from varuna.cut_point import current_observer
from varuna.diagnostics.user_code import user_code
from varuna.partition.errors import PartitionError
from varuna.partition.stages.ghost import are_hollow, hollow_value

__all__ = ["opaque"]

_CallableT = TypeVar("_CallableT", bound=Callable[..., Any])


@overload
def opaque(called: _CallableT, *, shapes: Callable[..., Any] | int) -> _CallableT: ...
@overload
def opaque(called: None = None, *, shapes: Callable[..., Any] | int) -> Callable[[_CallableT], _CallableT]: ...
def opaque(called: _CallableT | None = None, *, shapes: Callable[..., Any] | int) -> Any:
    """Declares the output of a function or module whose kernel cannot run on tensors without values.

    `opaque(function, shapes=...)` returns a function to call in its place, `opaque(module, shapes=...)` returns the
    module itself, and `@opaque(shapes=...)` decorates a function or a class of modules. Real runs of the model do not
    change. The dry run assumes that the result depends on all tensors in the arguments and on a module's parameters.

    Args:
        shapes: called with the arguments of a call, with tensors on `meta` in place of its tensors; returns the same as
            the call, with tensors of the right shape and type (`lambda q, k, v: torch.empty_like(q)`). Or a number: the
            result is one tensor like the positional argument at that place.

    Raises:
        TypeError: `called` is neither a function, a module nor a class of modules.
    """
    make = shapes if callable(shapes) else _like_argument(shapes)
    if called is None:
        return lambda given: opaque(given, shapes=make)
    if isinstance(called, nn.Module):
        # On the class, because copies of a module must not share a method that is bound to the first.
        module: nn.Module = called
        module.__class__ = _opaque_class(type(module), make)
        return module
    if isinstance(called, type) and issubclass(called, nn.Module):
        called.forward = _declared(called.forward, make, method=True)
        return called
    if isinstance(called, type) or not callable(called):
        raise TypeError(f"varuna.opaque takes a function, a module or a class of modules, not {called!r}")
    return _declared(called, make, method=False)


def _opaque_class(kind: type[nn.Module], make: Callable[..., Any]) -> type[nn.Module]:
    forward = _declared(kind.forward, make, method=True)
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _like_argument(position: int) -> Callable[..., Any]:
    return lambda *args, **kwargs: torch.empty_like(args[position])


def _declared(function: Callable[..., Any], make: Callable[..., Any], *, method: bool) -> Callable[..., Any]:
    """`function`, but not called in a dry run, nor on the placeholders of other stages' tensors."""

    @wraps(function)
    def declared(*args: Any, **kwargs: Any) -> Any:
        given = (args[1:] if method else args, kwargs)
        tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
        if method:
            tensors += [*args[0].parameters(), *args[0].buffers()]
        recorder = current_observer()
        if recorder is not None and hasattr(recorder, "record_opaque_call"):
            return _record(recorder, make, given, tensors)
        if are_hollow(tensors):
            return tree_map(partial(_hollow_like, device=tensors[0].device), _make(make, given))
        return function(*args, **kwargs)

    return declared


def _hollow_like(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.full(leaf.shape, hollow_value(leaf.dtype, needs_numbers=False), dtype=leaf.dtype, device=device)


def _record(recorder: Any, make: Callable[..., Any], given: Any, tensors: list[Tensor]) -> Any:
    with recorder.without_recording():
        leaves, structure = tree_flatten(_make(make, given))
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not where:
        return tree_unflatten(leaves, structure)
    made = _OpaqueResult.apply(recorder, [leaves[index] for index in where], *tensors)  # type: ignore[no-untyped-call]
    for index, tensor in zip(where, made, strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, structure)


def _make(make: Callable[..., Any], given: Any) -> Any:
    """The result of `shapes` for the arguments. Raises PartitionError when it fails or makes tensors with memory."""

    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    args, kwargs = tree_map(on_meta, given)
    with torch.no_grad():
        try:
            made = make(*args, **kwargs)
        except Exception as error:
            raise PartitionError(
                f"shapes of varuna.opaque failed for the call at {user_code()}: {type(error).__name__}: {error}. It "
                "is called with the arguments of the call, whose tensors are on meta, and returns the same as the call"
            ) from error
    wrong = [leaf.device for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor) and not leaf.is_meta]
    if wrong:
        raise PartitionError(
            f"shapes of varuna.opaque, for the call at {user_code()}, made a tensor on {wrong[0]}: make it of its "
            "arguments, which are on meta (q.new_empty(...), torch.empty_like(q))"
        )
    return made


class _OpaqueResult(torch.autograd.Function):
    """The call in a dry run: autograd sees that its results are computed from all of its tensors."""

    @staticmethod
    def forward(ctx: Any, recorder: Any, metas: list[Tensor], *tensors: Tensor) -> Any:
        return tuple(recorder.record_opaque_call(metas, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("no dry run has a backward")
