"""Ghosts: what stands for modules of earlier stages while a stage runs the user's forward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from varuna.partition.graph import Call, ObjectLeaf, TensorLeaf
from varuna.partition.model_map import ModelMap
from varuna.partition.shapes import Size, TensorSpec
from varuna.partition.structure import Structure, take_apart

__all__ = ["Ghost", "Zeros", "are_hollow", "give_memory", "make_ghost", "put_in"]


_hollow: WeakSet[Tensor] = WeakSet()
"""The elements of all `Zeros`."""


def are_hollow(tensors: Iterable[Tensor]) -> bool:
    """Whether any has no memory of its own: reading it by its data pointer would read what is behind one element."""
    elements = {element.untyped_storage()._cdata for element in _hollow}
    return any(tensor.layout == torch.strided and tensor.untyped_storage()._cdata in elements for tensor in tensors)


class Zeros:
    """Tensors of zeros that take no memory: one element, seen with stride zero."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elements: dict[torch.dtype, Tensor] = {}

    def expanded(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        element = self._elements.get(dtype)
        if element is None:
            element = self._elements[dtype] = torch.zeros((), dtype=dtype, device=self._device)
            _hollow.add(element)
        return element.expand(shape)

    def dense(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """With memory, for code that writes into it."""
        return torch.zeros(shape, dtype=dtype, device=self._device)


def give_memory(module: nn.Module, names: Container[str]) -> None:
    """Gives the buffers of these names memory, for code that writes into them, where they are zeros without any."""
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            name = f"{path}.{key}" if path else key
            if buffer is not None and name in names and buffer.numel() > 1 and not any(buffer.stride()):
                part._buffers[key] = torch.zeros_like(buffer, memory_format=torch.contiguous_format)


def put_in(received: Tensor, copied: bool) -> Tensor:
    """What the user's code sees of a received tensor: never the leaf itself, which it could not change in place.

    `copied` when it does change it in place: the engine may run this forward again from the same tensor.
    """
    return received.clone() if copied else received.view_as(received)


@dataclass(frozen=True, slots=True)
class _Zero:
    spec: TensorSpec
    dense: bool  # the code writes into it

    def make(self, zeros: Zeros, batch: int) -> Tensor:
        make = zeros.dense if self.dense else zeros.expanded
        return make(self.spec.shape_for(batch), self.spec.dtype)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A received tensor; written into the argument at `argument` where the module changed that in place."""

    slot: int
    copied: bool
    argument: int | None


@dataclass(frozen=True, slots=True)
class _Argument:
    position: int


_Leaf = _Zero | _Slot | _Argument | Size | ObjectLeaf


@dataclass(frozen=True, slots=True)
class Ghost:
    """Makes the output that a module call had in the dry run, with received tensors in their places."""

    structure: Structure
    leaves: tuple[_Leaf, ...]
    needs_arguments: bool
    puts_in_grad: bool  # a received tensor that requires a gradient

    def output(
        self, zeros: Zeros, batch: int, received: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        arguments = take_apart((args, dict(kwargs)))[0] if self.needs_arguments else []
        return self.structure.put_together([self._leaf(x, zeros, batch, received, arguments) for x in self.leaves])

    def _leaf(self, leaf: _Leaf, zeros: Zeros, batch: int, received: Sequence[Tensor], arguments: list[Any]) -> Any:
        if isinstance(leaf, _Zero):
            return leaf.make(zeros, batch)
        if isinstance(leaf, _Slot):
            if leaf.argument is None:
                return put_in(received[leaf.slot], leaf.copied)
            return arguments[leaf.argument].copy_(received[leaf.slot])
        if isinstance(leaf, _Argument):
            return arguments[leaf.position]
        return leaf.at(batch) if isinstance(leaf, Size) else leaf.value


def make_ghost(model_map: ModelMap, call: Call, slots: Mapping[int, int]) -> Ghost:
    """The ghost of `call`; `slots` says which received tensor each transported value is."""
    leaf_of = _leaf_maker(model_map, slots)
    leaves = tuple(
        leaf_of(leaf, spec) for leaf, spec in zip(call.leaves, model_map.leaf_specs[call.index], strict=True)
    )
    assert call.structure is not None
    asks = any(isinstance(x, _Argument) or (isinstance(x, _Slot) and x.argument is not None) for x in leaves)
    grads = any(
        isinstance(leaf, _Slot) and isinstance(spec, TensorSpec) and spec.requires_grad
        for leaf, spec in zip(leaves, model_map.leaf_specs[call.index], strict=True)
    )
    return Ghost(call.structure, leaves, asks, grads)


def _leaf_maker(
    model_map: ModelMap, slots: Mapping[int, int]
) -> Callable[[TensorLeaf | ObjectLeaf, TensorSpec | Size | None], _Leaf]:
    values = model_map.graph.values

    def leaf_of(leaf: TensorLeaf | ObjectLeaf, spec: TensorSpec | Size | None) -> _Leaf:
        if isinstance(leaf, TensorLeaf):
            value = values[leaf.value]
            slot = slots.get(value.same_as)
            if slot is not None and leaf.made_inside:
                return _Slot(slot, value.changed_in_place, leaf.argument)
            if leaf.argument is not None:
                return _Argument(leaf.argument)
            assert isinstance(spec, TensorSpec)
            return _Zero(spec, value.changed_in_place)
        if leaf.argument is not None:
            return _Argument(leaf.argument)
        return spec if isinstance(spec, Size) else leaf

    return leaf_of
