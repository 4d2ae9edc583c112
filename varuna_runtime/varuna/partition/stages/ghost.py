"""Ghosts: they replace modules of earlier stages while a stage runs the user's forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from varuna.partition.cutting.graph import ModuleCall, ObjectLeaf, TensorLeaf
from varuna.partition.cutting.model_map import ModelMap
from varuna.partition.cutting.shapes import LinearSize, TensorSpec
from varuna.partition.model_io.structure import Structure, flatten_nested

__all__ = [
    "Ghost",
    "HollowTensors",
    "allocate_buffers",
    "are_hollow",
    "ghost_numbers",
    "hollow_value",
    "inject",
    "make_ghost",
    "number_for",
    "overwrite",
]


_hollow: WeakSet[Tensor] = WeakSet()
"""The elements of all `HollowTensors`."""


def are_hollow(tensors: Iterable[Tensor]) -> bool:
    """Whether any tensor is one element without more memory: its data pointer must not be read."""
    elements = {element.untyped_storage()._cdata for element in _hollow}
    return any(tensor.layout == torch.strided and tensor.untyped_storage()._cdata in elements for tensor in tensors)


def hollow_value(dtype: torch.dtype, *, needs_numbers: bool) -> float:
    """What a tensor that a stage does not have holds: what shows in the loss if the forward reads it after all.

    Integers are zeros, because code that uses no result of theirs takes them as indices. So is everything where
    `needs_numbers`: such code has operations that fail without numbers.
    """
    return math.nan if (dtype.is_floating_point or dtype.is_complex) and not needs_numbers else 0


class HollowTensors:
    """Tensors that take no memory: one element, seen with stride zero."""

    def __init__(self, device: torch.device, *, needs_numbers: bool) -> None:
        self._device = device
        self._needs_numbers = needs_numbers
        self._elements: dict[tuple[torch.dtype, str], Tensor] = {}
        """By type and value."""

    def make_expanded(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """In place of a tensor that another stage has."""
        return self._expand(hollow_value(dtype, needs_numbers=self._needs_numbers), shape, dtype)

    def make_unread(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """In place of a tensor that nothing reads. It holds no zeros but what shows, if something reads it after all:
        no numbers, or integers that are no index."""
        is_fraction = dtype.is_floating_point or dtype.is_complex
        least = 0 if dtype == torch.bool or is_fraction else torch.iinfo(dtype).min
        return self._expand(math.nan if is_fraction else least, shape, dtype)

    def _expand(self, value: float, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        key = dtype, str(value)
        element = self._elements.get(key)
        if element is None:
            element = self._elements[key] = torch.full((), value, dtype=dtype, device=self._device)
            _hollow.add(element)
        return element.expand(shape)

    def make_dense(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """With memory, for code that writes into it."""
        value = hollow_value(dtype, needs_numbers=self._needs_numbers)
        return torch.full(tuple(shape), value, dtype=dtype, device=self._device)


def allocate_buffers(module: nn.Module, names: Container[str]) -> None:
    """Gives memory to the buffers of these names that have none, for code that writes into them."""
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            name = f"{path}.{key}" if path else key
            if buffer is not None and name in names and buffer.numel() > 1 and not any(buffer.stride()):
                part._buffers[key] = buffer.clone(memory_format=torch.contiguous_format)


def overwrite(hollow: Tensor, received: Tensor) -> Tensor:
    """`hollow` with the values of a received tensor, for code that goes on with that object.

    Without its history: a gradient of zeros would go back through it and be no number, where it meets a placeholder.
    """
    if hollow.requires_grad and not hollow._is_view():  # a view cannot be detached
        hollow.detach_()
    return hollow.copy_(received)


def inject(received: Tensor, copied: bool) -> Tensor:
    """A received tensor as the user's code gets it: never the leaf itself, which could not be changed in place.

    `copied`: whether the code changes it in place, because the engine may run this forward again from the same tensor.
    """
    return received.clone() if copied else received.view_as(received)


@dataclass(frozen=True, slots=True)
class _HollowLeaf:
    spec: TensorSpec
    dense: bool  # the code writes into it

    def make_tensor(self, hollow: HollowTensors, batch: int) -> Tensor:
        make = hollow.make_dense if self.dense else hollow.make_expanded
        return make(self.spec.shape_for(batch), self.spec.dtype)


@dataclass(frozen=True, slots=True)
class _ReceivedLeaf:
    """A received tensor; it is written into the argument at `argument` if the module changed that in place."""

    slot: int
    copied: bool
    argument: int | None


@dataclass(frozen=True, slots=True)
class _ArgumentLeaf:
    position: int


_Leaf = _HollowLeaf | _ReceivedLeaf | _ArgumentLeaf | LinearSize | ObjectLeaf


@dataclass(frozen=True, slots=True)
class Ghost:
    """Makes the output that a module's call had in the dry run, with the received tensors in their places."""

    structure: Structure
    leaves: tuple[_Leaf, ...]
    needs_arguments: bool
    injects_grad: bool  # it returns a received tensor that requires a gradient

    def make_output(
        self,
        hollow: HollowTensors,
        batch: int,
        received: Sequence[Tensor],
        *,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        arguments = flatten_nested((args, dict(kwargs)))[0] if self.needs_arguments else []
        return self.structure.unflatten_leaves(
            [self._leaf(x, hollow, batch, received=received, arguments=arguments) for x in self.leaves]
        )

    def _leaf(
        self, leaf: _Leaf, hollow: HollowTensors, batch: int, *, received: Sequence[Tensor], arguments: list[Any]
    ) -> Any:
        if isinstance(leaf, _HollowLeaf):
            return leaf.make_tensor(hollow, batch)
        if isinstance(leaf, _ReceivedLeaf):
            if leaf.argument is None:
                return inject(received[leaf.slot], leaf.copied)
            return overwrite(arguments[leaf.argument], received[leaf.slot])
        if isinstance(leaf, _ArgumentLeaf):
            return arguments[leaf.position]
        return number_for(leaf, batch)


def number_for(leaf: LinearSize | ObjectLeaf, batch: int) -> Any:
    """The plain value that a ghost returns for `batch` examples."""
    return leaf.for_batch(batch) if isinstance(leaf, LinearSize) else leaf.value


def ghost_numbers(model_map: ModelMap, call: ModuleCall) -> tuple[tuple[int, LinearSize | ObjectLeaf], ...]:
    """The numbers that ghosts of `call` return, each with its position among the leaves of the output."""
    return tuple(
        (position, spec if isinstance(spec, LinearSize) else leaf)
        for position, (leaf, spec) in enumerate(zip(call.leaves, model_map.leaf_specs[call.index], strict=True))
        if isinstance(leaf, ObjectLeaf) and leaf.is_number
    )


def make_ghost(model_map: ModelMap, call: ModuleCall, slots: Mapping[int, int]) -> Ghost:
    """The ghost of `call`. `slots`: the position of each transported value among the received tensors."""
    leaf_of = _leaf_maker(model_map, slots)
    leaves = tuple(
        leaf_of(leaf, spec) for leaf, spec in zip(call.leaves, model_map.leaf_specs[call.index], strict=True)
    )
    assert call.structure is not None
    needs_arguments = any(
        isinstance(x, _ArgumentLeaf) or (isinstance(x, _ReceivedLeaf) and x.argument is not None) for x in leaves
    )
    grads = any(
        isinstance(leaf, _ReceivedLeaf) and isinstance(spec, TensorSpec) and spec.requires_grad
        for leaf, spec in zip(leaves, model_map.leaf_specs[call.index], strict=True)
    )
    return Ghost(call.structure, leaves, needs_arguments, grads)


def _leaf_maker(
    model_map: ModelMap, slots: Mapping[int, int]
) -> Callable[[TensorLeaf | ObjectLeaf, TensorSpec | LinearSize | None], _Leaf]:
    values = model_map.graph.values

    def leaf_of(leaf: TensorLeaf | ObjectLeaf, spec: TensorSpec | LinearSize | None) -> _Leaf:
        if isinstance(leaf, TensorLeaf):
            value = values[leaf.value]
            slot = slots.get(value.same_as)
            if slot is not None and leaf.made_inside:
                return _ReceivedLeaf(slot, value.changed_in_place, leaf.argument)
            if leaf.argument is not None:
                return _ArgumentLeaf(leaf.argument)
            assert isinstance(spec, TensorSpec)
            return _HollowLeaf(spec, value.changed_in_place)
        if leaf.argument is not None:
            return _ArgumentLeaf(leaf.argument)
        return spec if isinstance(spec, LinearSize) else leaf

    return leaf_of
