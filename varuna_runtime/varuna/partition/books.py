"""The books of a dry run: the fake tensors, which values they are, and what uses and changes them.

Tensors are fake (no memory, no arithmetic); those that follow from the inputs alone also have a real *shadow*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten

from varuna.partition.errors import PartitionError
from varuna.partition.graph import Graph, Kind, TensorLeaf, Value
from varuna.partition.special_parameters import fake_class_of
from varuna.places import users_code

__all__ = ["Books", "storage_of"]


class Books:
    """Tensors of the model and the inputs are entered with `fake_*` before the dry run starts."""

    def __init__(self, batch: int) -> None:
        self.graph = Graph(batch)
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        # A kernel that reads memory by its address gets an error from a fake tensor, instead of address 0.
        self._fake_mode._allow_unsafe_data_ptr_access = False
        self._section = 0
        self._stack = [-1]  # calls that have not returned
        # Keyed by id: the tensors are kept alive with their value, so that no id or storage address is used twice.
        self._known: dict[int, tuple[Tensor, Value]] = {}
        self._adopted: dict[int, tuple[Tensor, Tensor]] = {}
        self._given: dict[int, Tensor] = {}  # the other way round
        self._shadows: dict[int, Tensor] = {}
        self._by_storage: dict[int, list[Tensor]] = {}
        self._changed_outside: dict[int, dict[int, Tensor]] = {}  # by call: tensors from outside that it has changed
        self._parameters: dict[str, Value] = {}
        self._tensors: list[Tensor] = []  # by value index
        self._originals: dict[int, str] = {}  # the user's own tensors, which the dry run must not meet
        self._buffers: dict[str, Tensor] = {}  # the fakes that it began with
        self._memory: dict[int, int] = {}  # storages of parameters and buffers, by id of the fake
        self._constants_changed = False
        self._born_before = 0  # values of the first of two forwards
        self._left_behind: dict[int, str] = {}  # those of them that the second used, and where

    def fake_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter without memory."""
        fake = nn.Parameter(self._fake(parameter), requires_grad=parameter.requires_grad)
        fake.__class__ = fake_class_of(parameter)  # type: ignore[assignment]
        fake.__dict__.update(parameter.__dict__)
        value = self._record(fake, Kind.PARAMETER, (), dependent=True, place=f"parameter {name}")
        value.weight = name
        self._parameters[name] = value
        self._memory[id(fake)] = storage_of(fake)
        return fake

    def fake_buffer(self, name: str, buffer: Tensor) -> Tensor:
        """A buffer; its shadow is a copy, since forward may change it."""
        fake = self._fake(buffer)
        self._record(fake, Kind.GIVEN, (), dependent=False, place=f"buffer {name}").buffer = name
        self._buffers[name] = fake
        self._memory[id(fake)] = storage_of(fake)
        if not buffer.is_meta:
            self._keep_shadow(fake, buffer.detach().to("cpu", copy=True))
        return fake

    def fake_input(self, name: str, tensor: Tensor) -> Tensor:
        fake = self._fake(tensor)
        self._record(fake, Kind.GIVEN, (), dependent=False, place=f"input {name}")
        if not tensor.is_meta:
            self._keep_shadow(fake, tensor.detach().to("cpu", copy=True))
        return fake

    def must_not_meet(self, name: str, original: Tensor) -> None:
        """`original` is the user's own: a copy of the model that still reads it has a reference that copying missed."""
        self._originals[id(original)] = name

    def _fake(self, tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._fake_mode, meta, torch.device("cpu"))

    def _record(
        self, tensor: Tensor, kind: Kind, parents: Sequence[Value], *, dependent: bool, random: bool = False, place: str
    ) -> Value:
        index = len(self.graph.values)
        value = Value(
            index,
            kind,
            self._section,
            self._stack[-1],
            tuple(parent.index for parent in parents),
            dependent,
            random,
            place,
            tuple(tensor.shape),
            tensor.dtype,
            False,
            same_as=index,
        )
        self.graph.values.append(value)
        self._tensors.append(tensor)
        if id(tensor) not in self._known:
            self._by_storage.setdefault(storage_of(tensor), []).append(tensor)
        self._known[id(tensor)] = (tensor, value)
        return value

    def _value(self, tensor: Tensor) -> Value:
        known = self._known.get(id(tensor))
        return known[1] if known is not None else self._value(self._fake_of(tensor))

    def _fake_of(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor that is neither parameter, buffer nor input: a constant that the code holds."""
        if id(tensor) in self._known:
            return tensor
        adopted = self._adopted.get(id(tensor))
        if adopted is not None:
            return adopted[1]
        self._refuse_strays(tensor)
        fake = self._fake(tensor)
        self._adopted[id(tensor)] = (tensor, fake)
        self._given[id(fake)] = tensor
        self._record(fake, Kind.GIVEN, (), dependent=False, place=f"a constant at {users_code()}").call = -1
        if not tensor.is_meta:
            self._keep_shadow(fake, tensor)
        return fake

    def _refuse_strays(self, tensor: Tensor) -> None:
        name = self._originals.get(id(tensor))
        if name is not None:
            raise PartitionError(
                f"forward reads {name} at {users_code()} through a reference that is not in the module tree (a "
                "lambda or closure over the model); stages could not follow it. Read it through self inside a method"
            )
        if isinstance(tensor, FakeTensor):
            raise PartitionError(
                f"forward uses at {users_code()} a tensor of shape {tuple(tensor.shape)} that an earlier forward left "
                "behind outside of the model (in a global list, a closure): each stage and replica would have its own, "
                "and no checkpoint holds it. Make it a buffer (register_buffer) that forward changes, or pass it in as "
                "an input"
            )
        if tensor.requires_grad:
            raise PartitionError(
                f"the tensor of shape {tuple(tensor.shape)} used at {users_code()} requires gradients but is no "
                "parameter of the model; register it as an nn.Parameter"
            )

    def _as_given(self, output: Any) -> Any:
        """In-place operations return the tensor that they were given, not its fake."""
        return self._given.get(id(output), output)

    def _keep_shadow(self, tensor: Tensor, shadow: Tensor) -> None:
        self._shadows[self._known[id(tensor)][1].index] = shadow

    def _note_uses(self, inputs: Sequence[Value]) -> None:
        for value in inputs:
            value.used_in.add(self._section)
            if value.index < self._born_before and value.kind in (Kind.COMPUTED, Kind.CUT) and value.buffer is None:
                self._left_behind.setdefault(value.index, users_code())
            if value.weight is not None:
                self._parameters[value.weight].used_in.add(self._section)
            if value.buffer is not None:
                self.graph.buffers_used.setdefault(value.buffer, set()).add(self._section)
            self._note_leaks(value)

    def _note_leaks(self, value: Value) -> None:
        """Mark the calls that have returned, without this value, though it was made inside them."""
        index = value.call
        while index >= 0 and index not in self._stack:
            call = self.graph.calls[index]
            call.leaks = call.leaks or all(
                not isinstance(leaf, TensorLeaf) or leaf.value != value.index for leaf in call.leaves
            )
            index = call.parent

    def _note_outputs(self, output: Any, real: Any, inputs: Sequence[Value], random: bool) -> None:
        made = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
        shadows = (
            [x for x in tree_flatten(real)[0] if isinstance(x, Tensor)] if real is not None else [None] * len(made)
        )
        for tensor, shadow in zip(made, shadows, strict=True):
            if id(tensor) in self._known:
                continue  # changed in place, or handed back as it was
            dependent = random or any(value.dependent for value in inputs)
            value = self._record(tensor, Kind.COMPUTED, inputs, dependent=dependent, random=random, place=users_code())
            if len(inputs) == 1 and not random:
                value.weight = inputs[0].weight
            if shadow is not None:
                self._keep_shadow(tensor, shadow)

    def _note_changes(self, written: Sequence[Tensor], inputs: Sequence[Value], random: bool, followed: bool) -> None:
        """Tensors changed in place, and all that share their memory, are new values from here on."""
        dependent = random or any(value.dependent for value in inputs)
        for changed in written:
            for tensor in self._by_storage[storage_of(changed)]:
                old = self._value(tensor)
                if old.kind is Kind.PARAMETER:
                    raise PartitionError(
                        f"forward changes {old.place} in place at {users_code()}: replicas, which see other examples, "
                        "would each have their own. Change it after step(), or compute another tensor from it"
                    )
                self._constants_changed |= old.kind is Kind.GIVEN and id(tensor) in self._given
                old.changed_in_place = True
                if old.buffer is not None:
                    self.graph.buffers_changed.setdefault(old.buffer, users_code())
                else:
                    for call in self._stack[1:]:
                        if old.call < call:
                            self._changed_outside.setdefault(call, {})[id(tensor)] = tensor
                shadow = self._shadows.get(old.index)
                others = [value for value in inputs if value is not old]
                new = self._record(
                    tensor,
                    Kind.COMPUTED,
                    [old, *others],
                    dependent=dependent or old.dependent,
                    random=random,
                    place=users_code(),
                )
                new.buffer = old.buffer
                if followed and shadow is not None:
                    self._keep_shadow(tensor, shadow)


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
