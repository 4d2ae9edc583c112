"""The table of a dry run's values: which value each fake tensor is, and what uses and changes it.

Tensors are fake (no memory, no arithmetic). Those that follow from the inputs alone also have a real *shadow*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from varuna.diagnostics.user_code import user_code
from varuna.partition.cutting.graph import Graph, ModuleCall, TensorLeaf, Value, ValueKind
from varuna.partition.errors import PartitionError
from varuna.partition.modules.special_parameters import fake_class_of
from varuna.partition.tracing.operation_calls import storage_of, tensors_in

__all__ = ["ValueTable"]


class ValueTable:
    """The `fake_…` methods enter the tensors of the model and the inputs, before the dry run starts."""

    def __init__(self, batch: int) -> None:
        self.graph = Graph(batch)
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        # A kernel that reads memory by its address gets an error, not address 0.
        self._fake_mode._allow_unsafe_data_ptr_access = False
        self._section = 0
        self._stack = [-1]  # indices of the calls that have not returned
        # By id of the tensor. Tensors stay alive with their value, so that no id or storage address is used twice.
        self._known: dict[int, tuple[Tensor, Value]] = {}
        self._adopted: dict[int, tuple[Tensor, Tensor]] = {}  # by id of a constant: the constant and its fake
        self._given: dict[int, Tensor] = {}  # by id of the fake: the constant that it stands for
        self._shadows: dict[int, Tensor] = {}
        self._by_storage: dict[int, list[Tensor]] = {}
        self._changed_outside: dict[int, dict[int, Tensor]] = {}  # by call: tensors made outside that it has changed
        self._parameters: dict[str, Value] = {}
        self._tensors: list[Tensor] = []  # by value index
        self._originals: dict[int, str] = {}  # by id: the user's own tensors, which forward must not use
        self._buffers: dict[str, Tensor] = {}  # the fakes at the start
        self._memory: dict[int, int] = {}  # by id of the fake of a parameter or buffer: its storage
        self._constants_changed = False
        self._first_forward_end = 0  # in a second forward: the number of values that the first one made
        self._carried: dict[int, str] = {}  # values of the first forward that the second used -> places

    def fake_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """A fake without memory for `parameter`."""
        fake: Any = self._fake(parameter).requires_grad_(parameter.requires_grad)
        fake._is_param = True  # as nn.Parameter() does, which detaches first: a third of the time of a hollow copy
        fake.__class__ = fake_class_of(parameter)
        fake.__dict__.update(parameter.__dict__)
        value = self._add_value(fake, ValueKind.PARAMETER, (), dependent=True, place=f"parameter {name}")
        value.weight = name
        self._parameters[name] = value
        self._memory[id(fake)] = storage_of(fake)
        made: nn.Parameter = fake
        return made

    def fake_buffer(self, name: str, buffer: Tensor) -> Tensor:
        """A fake for `buffer`. Its shadow is a copy, because forward may change it."""
        fake = self._fake(buffer)
        self._add_value(fake, ValueKind.GIVEN, (), dependent=False, place=f"buffer {name}").buffer = name
        self._buffers[name] = fake
        self._memory[id(fake)] = storage_of(fake)
        if not buffer.is_meta:
            self._keep_shadow(fake, buffer.detach().to("cpu", copy=True))
        return fake

    def fake_input(self, name: str, tensor: Tensor) -> Tensor:
        fake = self._fake(tensor)
        self._add_value(fake, ValueKind.GIVEN, (), dependent=False, place=f"input {name}").input = name
        if not tensor.is_meta:
            self._keep_shadow(fake, tensor.detach().to("cpu", copy=True))
        return fake

    def forbid_original(self, name: str, original: Tensor) -> None:
        """Refuse later uses of `original`, the user's own tensor, through a reference that copying the model missed."""
        self._originals[id(original)] = name

    def _fake(self, tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._fake_mode, meta, torch.device("cpu"))

    def _add_value(
        self,
        tensor: Tensor,
        kind: ValueKind,
        parents: Sequence[Value],
        *,
        dependent: bool,
        random: bool = False,
        place: str,
    ) -> Value:
        index = len(self.graph.values)
        value = Value(
            index=index,
            kind=kind,
            section=self._section,
            call=self._stack[-1],
            parents=tuple(parent.index for parent in parents),
            dependent=dependent,
            random=random,
            place=place,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
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
        """`tensor`, or the fake of a constant that the code holds (neither parameter, buffer nor input)."""
        if id(tensor) in self._known:
            return tensor
        adopted = self._adopted.get(id(tensor))
        if adopted is not None:
            return adopted[1]
        self._refuse_strays(tensor)
        fake = self._fake(tensor)
        self._adopted[id(tensor)] = (tensor, fake)
        self._given[id(fake)] = tensor
        self._add_value(fake, ValueKind.GIVEN, (), dependent=False, place=f"a constant at {user_code()}").call = -1
        if not tensor.is_meta:
            self._keep_shadow(fake, tensor)
        return fake

    def _refuse_strays(self, tensor: Tensor) -> None:
        name = self._originals.get(id(tensor))
        if name is not None:
            raise PartitionError(
                f"forward reads {name} at {user_code()} through a reference that is not in the module tree (a "
                "lambda or closure over the model); stages could not follow it. Read it through self inside a method"
            )
        if isinstance(tensor, FakeTensor):
            raise PartitionError(
                f"forward uses at {user_code()} a tensor of shape {tuple(tensor.shape)} that an earlier forward left "
                "behind outside of the model (in a global list, a closure): each stage and replica would have its own, "
                "and no checkpoint holds it. Make it a buffer (register_buffer) that forward changes, or pass it in as "
                "an input"
            )
        if tensor.requires_grad:
            raise PartitionError(
                f"the tensor of shape {tuple(tensor.shape)} used at {user_code()} requires gradients but is no "
                "parameter of the model; register it as an nn.Parameter"
            )

    def _as_given(self, output: Any) -> Any:
        """The tensor to return to the code: operations in place return the tensor that they got, not its fake."""
        return self._given.get(id(output), output)

    def _keep_shadow(self, tensor: Tensor, shadow: Tensor) -> None:
        self._shadows[self._known[id(tensor)][1].index] = shadow

    def _record_uses(self, inputs: Sequence[Value]) -> None:
        for value in inputs:
            value.used_in.add(self._section)
            if (
                value.index < self._first_forward_end
                and value.kind in (ValueKind.COMPUTED, ValueKind.CUT)
                and value.buffer is None
            ):
                self._carried.setdefault(value.index, user_code())
            if value.weight is not None:
                self._parameters[value.weight].used_in.add(self._section)
            if value.buffer is not None:
                self.graph.buffers_used.setdefault(value.buffer, set()).add(self._section)
            self._record_leaks(value)

    def _record_reads(self, inputs: Sequence[Value]) -> None:
        for value in inputs:
            if value.input is not None:
                value.read_at.add((self._section, self._stack[-1]))

    def _are_views(self, output: Any, inputs: Sequence[Value]) -> bool:
        """Whether an operation has only made views of its one input (a change in place returns the tensor itself)."""
        made = tensors_in(output)
        if len(inputs) != 1 or not made:
            return False
        viewed = self._tensors[inputs[0].index]
        return all(tensor is not viewed and storage_of(tensor) == storage_of(viewed) for tensor in made)

    def _record_leaks(self, value: Value) -> None:
        """Mark the calls that made this value but have returned without it."""
        for call in self._returned_calls(value.call):
            call.leaks = call.leaks or all(
                not isinstance(leaf, TensorLeaf) or leaf.value != value.index for leaf in call.leaves
            )

    def _returned_calls(self, index: int) -> Iterator[ModuleCall]:
        """Call `index` and those around it, as far as they have returned."""
        while index >= 0 and index not in self._stack:
            call = self.graph.calls[index]
            yield call
            index = call.parent

    def _record_outputs(self, output: Any, real: Any, inputs: Sequence[Value], random: bool) -> None:
        made = tensors_in(output)
        shadows = tensors_in(real) if real is not None else [None] * len(made)
        for tensor, shadow in zip(made, shadows, strict=True):
            if id(tensor) in self._known:
                continue  # changed in place, or returned unchanged
            dependent = random or any(value.dependent for value in inputs)
            value = self._add_value(
                tensor, ValueKind.COMPUTED, inputs, dependent=dependent, random=random, place=user_code()
            )
            if len(inputs) == 1 and not random:
                value.weight = inputs[0].weight
            if self._are_views([tensor], inputs):
                value.input = inputs[0].input
            if shadow is not None:
                self._keep_shadow(tensor, shadow)

    def _record_changes(self, written: Sequence[Tensor], inputs: Sequence[Value], random: bool, followed: bool) -> None:
        """Give new values to the tensors changed in place, and to all that share their memory."""
        dependent = random or any(value.dependent for value in inputs)
        for changed in written:
            for tensor in self._by_storage[storage_of(changed)]:
                old = self._value(tensor)
                if old.kind is ValueKind.PARAMETER:
                    raise PartitionError(
                        f"forward changes {old.place} in place at {user_code()}: replicas, which see other examples, "
                        "would each have their own. Change it after step(), or compute another tensor from it"
                    )
                self._constants_changed |= old.kind is ValueKind.GIVEN and id(tensor) in self._given
                old.changed_in_place = True
                if old.buffer is not None:
                    self.graph.buffers_changed.setdefault(old.buffer, user_code())
                else:
                    for call in self._stack[1:]:
                        if old.call < call:
                            self._changed_outside.setdefault(call, {})[id(tensor)] = tensor
                shadow = self._shadows.get(old.index)
                others = [value for value in inputs if value is not old]
                new = self._add_value(
                    tensor,
                    ValueKind.COMPUTED,
                    [old, *others],
                    dependent=dependent or old.dependent,
                    random=random,
                    place=user_code(),
                )
                new.buffer = old.buffer
                if followed and shadow is not None:
                    self._keep_shadow(tensor, shadow)
