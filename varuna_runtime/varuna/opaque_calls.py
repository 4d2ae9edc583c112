"""Kernels that are no operations of PyTorch's dispatcher: what they return is declared for the dry run.

Triton kernels, extensions that read data pointers, builds of flash-attention: on the fake tensors of a dry run they
fail. Code that knows `torch.library.custom_op` with `register_fake` needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from varuna.cut_point import current_observer
from varuna.partition.errors import PartitionError
from varuna.partition.ghost import are_hollow
from varuna.places import users_code

__all__ = ["opaque"]

_Called = TypeVar("_Called", bound=Callable[..., Any])


@overload
def opaque(called: _Called, *, shapes: Callable[..., Any] | int) -> _Called: ...
@overload
def opaque(called: None = None, *, shapes: Callable[..., Any] | int) -> Callable[[_Called], _Called]: ...
def opaque(called: _Called | None = None, *, shapes: Callable[..., Any] | int) -> Any:
    """Declares what a function or module returns whose kernel cannot run on tensors without values.

    `opaque(function, shapes=...)` returns a function to call in its place, `opaque(module, shapes=...)` the module
    itself, and `@opaque(shapes=...)` decorates a function or a class of modules. Where the model really runs, nothing
    changes. The dry run takes it that the result depends on all tensors in the arguments and on a module's parameters.

    Args:
        shapes: called with the arguments of a call, in which tensors of device `meta` stand for the tensors; returns
            what the call would, with tensors of the right shape and type (`lambda q, k, v: torch.empty_like(q)`). Or a
            number: the result is one tensor like the positional argument at that place.

    Raises:
        TypeError: it is neither a function, a module nor a class of modules.
    """
    make = shapes if callable(shapes) else _like_argument(shapes)
    if called is None:
        return lambda given: opaque(given, shapes=make)
    if isinstance(called, nn.Module):
        # On the class, since copies of a module must not share a method that is bound to the first.
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
    """`function`, which is not called in a dry run, nor on what stands for tensors of other stages."""

    @wraps(function)
    def declared(*args: Any, **kwargs: Any) -> Any:
        given = (args[1:] if method else args, kwargs)
        tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
        if method:
            tensors += [*args[0].parameters(), *args[0].buffers()]
        recorder = current_observer()
        if recorder is not None and hasattr(recorder, "opaque_called"):
            return _record(recorder, make, given, tensors)
        if are_hollow(tensors):
            made = _make(make, given)
            return tree_map(
                lambda x: torch.zeros(x.shape, dtype=x.dtype, device=tensors[0].device) if isinstance(x, Tensor) else x,
                made,
            )
        return function(*args, **kwargs)

    return declared


def _record(recorder: Any, make: Callable[..., Any], given: Any, tensors: list[Tensor]) -> Any:
    with recorder.aside():
        leaves, structure = tree_flatten(_make(make, given))
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not where:
        return tree_unflatten(leaves, structure)
    made = _Stands.apply(recorder, [leaves[index] for index in where], *tensors)  # type: ignore[no-untyped-call]
    for index, tensor in zip(where, made, strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, structure)


def _make(make: Callable[..., Any], given: Any) -> Any:
    """What `shapes` makes of the arguments. Raises PartitionError when it fails or makes tensors with memory."""

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
                f"shapes of varuna.opaque failed for the call at {users_code()}: {type(error).__name__}: {error}. It "
                "is called with the arguments of the call, whose tensors are on meta, and returns what the call would"
            ) from error
    wrong = [leaf.device for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor) and not leaf.is_meta]
    if wrong:
        raise PartitionError(
            f"shapes of varuna.opaque, for the call at {users_code()}, made a tensor on {wrong[0]}: make it of its "
            "arguments, which are on meta (q.new_empty(...), torch.empty_like(q))"
        )
    return made


class _Stands(torch.autograd.Function):
    """The call in a dry run: what it returns is computed, differentiably, of all that it was given."""

    @staticmethod
    def forward(ctx: Any, recorder: Any, metas: list[Tensor], *tensors: Tensor) -> Any:
        return tuple(recorder.opaque_called(metas, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("no dry run has a backward")
