"""The results of operations on fake tensors. A model's layers are alike: what an operation has given is remembered.

torch remembers too, but for its compiler: to find and use what it remembers takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from varuna.partition.tracing.fake_rules import fake_rule
from varuna.partition.tracing.operation_calls import OperationCall, replace_tensors, storage_of

__all__ = ["FakeResults"]


class _Form(NamedTuple):
    """What a fake tensor is, apart from its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    """Of the first element in the memory."""


class _Result(NamedTuple):
    """A tensor that an operation gives."""

    form: _Form
    shares: int | None
    """The tensor among the arguments whose memory it has; None: it has its own."""


_KNOWN: dict[tuple[Any, ...], _Result | list[_Result] | tuple[_Result, ...]] = {}
"""Of all dry runs of the process, because a model has several: by operation and the forms of its arguments."""


class FakeResults:
    """Runs the operations of one dry run, in `mode`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def run(self, call: OperationCall) -> Any:
        """What an operation gives, all of whose tensors are fake."""
        if not (_follows_from_forms(call.func) and all(map(_is_plain, call.tensors))):
            return self._run(call)
        key = (call.func, torch.get_default_dtype(), _describe(call.args), _describe(tuple(call.kwargs.items())))
        known = _KNOWN.get(key)
        if known is not None:
            return self._make(known, call.tensors)
        result = self._run(call)
        if _can_be_made_again(result, call.tensors):
            memory = [storage_of(tensor) for tensor in call.tensors]
            _KNOWN[key] = replace_tensors(result, lambda x: _Result(_form_of(x), _find(storage_of(x), memory)))
        return result

    def _run(self, call: OperationCall) -> Any:
        with self._mode:
            return fake_rule(call.func)(*call.args, **call.kwargs)

    def _make(self, known: Any, tensors: Sequence[Tensor]) -> Any:
        if not isinstance(known, _Result):
            return type(known)([self._make(one, tensors) for one in known])
        form = known.form
        if known.shares is None:
            meta = _empty(form)
        else:
            meta = torch.empty(0, dtype=form.dtype, device="meta")
            meta.set_(tensors[known.shares].untyped_storage(), form.offset, form.shape, form.stride)
        return FakeTensor(self._mode, meta, form.device)


@cache
def _follows_from_forms(func: Any) -> bool:
    """Whether the form of its result follows from those of its arguments. Custom operators may look at anything."""
    return func.namespace == "aten" and not func._schema.is_mutable


def _describe(value: Any) -> Any:
    """What a result's form may depend on of an argument, to compare and to hash."""
    if isinstance(value, Tensor):
        return _form_of(value)
    if isinstance(value, list | tuple):
        return tuple([_describe(one) for one in value])
    return type(value), value  # 1 equals 1.0, but does not give the same dtype


def _form_of(tensor: Any) -> _Form:
    return _Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, tensor.storage_offset())


def _is_plain(tensor: Tensor) -> bool:
    """Whether nothing but its form and its memory tells `tensor` from others."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _can_be_made_again(result: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether it is one tensor, or several, each a view of an argument or with memory of its own of the usual size."""
    made = [result] if isinstance(result, Tensor) else result
    if not (isinstance(made, list | tuple) and made and all(isinstance(x, Tensor) and _is_plain(x) for x in made)):
        return False
    given = {storage_of(tensor) for tensor in tensors}
    own = [x for x in made if storage_of(x) not in given]
    return (
        not any(x is tensor for x in made for tensor in tensors)
        and len({storage_of(x) for x in own}) == len(own)
        and all(x.untyped_storage().nbytes() == _empty(_form_of(x)).untyped_storage().nbytes() for x in own)
    )


def _empty(form: _Form) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")


def _find(storage: int, memory: Sequence[int]) -> int | None:
    return memory.index(storage) if storage in memory else None
