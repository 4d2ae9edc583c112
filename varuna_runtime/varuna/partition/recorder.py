"""The dry run's recorder: writes down values, module calls and cut-points as the user's forward runs on fake tensors.

It sits at the dispatcher, below autograd and composite functions, so it sees every operation with a regular schema,
custom autograd functions and activation checkpointing included. Tensors are fake (no memory, no arithmetic); those that
follow from the inputs alone also have a real *shadow*, so code that looks at input values (`if mask.all():`) runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from varuna.cut_point import CutPoint
from varuna.partition.choices import rows_of_any
from varuna.partition.costs import cost_of
from varuna.partition.cut_places import PlacedCutPoint
from varuna.partition.errors import PartitionError
from varuna.partition.fake_rules import fake_rule, looks_at_integers_only
from varuna.partition.graph import Call, CutPass, Graph, Kind, ObjectLeaf, TensorLeaf, Value
from varuna.partition.left_behind import Attributes, GlobalDraws, attributes_of, changed, refuse_state
from varuna.partition.structure import take_apart
from varuna.partition.writes import written
from varuna.places import users_code

__all__ = ["Recorder"]

_aten = torch.ops.aten
# These look at the shape, dtype and device of a tensor only; a ghost has those right.
_SHAPE_ONLY = frozenset(
    {
        _aten.empty_like,
        _aten.zeros_like,
        _aten.ones_like,
        _aten.full_like,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten.new_zeros,
        _aten.new_ones,
        _aten.new_full,
        _aten.rand_like,
        _aten.randn_like,
        _aten.randint_like,
    }
)
_DEVICE_OF = torch.ops.prim.device.default
_LOOKS_AT_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_LARGEST_SHADOW = 1 << 20  # elements; larger masks are not worth their memory, and hardly looked at
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Records one dry run into `graph`. Tensors of the model and the inputs are made with `fake_*` before it starts.

    `pick_all`: masks over computed values pick all rows, else fewer (choices.py).
    """

    def __init__(self, batch: int, pick_all: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph(batch)
        self._pick_all = pick_all
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._section = 0
        self._stack = [-1]
        self._calls_of: dict[str, int] = {}
        self._cut_points: dict[int, CutPoint] = {}
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
        self._model = nn.Module()  # that is watched
        self._buffers: dict[str, Tensor] = {}  # the fakes that it began with
        self._draws = GlobalDraws()
        # For a second forward on the same copy: what the first left behind.
        self._attributes: Attributes = {}
        self._constants_changed = False
        self._operations: list[tuple[Any, ...]] = []
        self._born_before = 0  # values of the first forward
        self._left_behind: dict[int, str] = {}  # those of them that the second used, and where

    # Making the tensors of the model and the inputs

    def fake_parameter(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter without memory."""
        fake = nn.Parameter(self._fake(parameter), requires_grad=parameter.requires_grad)
        fake.__dict__.update(parameter.__dict__)
        value = self._record(fake, Kind.PARAMETER, (), dependent=True, place=f"parameter {name}")
        value.weight = name
        self._parameters[name] = value
        return fake

    def fake_buffer(self, name: str, buffer: Tensor) -> Tensor:
        """A buffer; its shadow is a copy, since forward may change it."""
        fake = self._fake(buffer)
        self._record(fake, Kind.GIVEN, (), dependent=False, place=f"buffer {name}").buffer = name
        self._buffers[name] = fake
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

    # Module calls and cut-points

    def watch(self, model: nn.Module) -> None:
        """Record every call of every module of `model`, which must be a copy of the user's: it is changed."""
        self._model = model
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise PartitionError(
                    f"module {path or 'model'} is a TorchScript module, which cannot be cut or watched; "
                    "use the ordinary module that it was scripted from"
                )
            if not isinstance(module, CutPoint):
                module.__dict__["forward"] = self._watched(path, module, module.forward)
        self._attributes = attributes_of(model)

    def _watched(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        owns_parameters = next(module.parameters(), None) is not None

        def watched(*args: Any, **kwargs: Any) -> Any:
            number = self._calls_of.get(path, 0)
            self._calls_of[path] = number + 1
            call = Call(len(self.graph.calls), path, number, self._stack[-1], owns_parameters, self._section)
            self.graph.calls.append(call)
            self._stack.append(call.index)
            arguments = take_apart((args, kwargs))[0]
            call.arguments = tuple(self._known[id(x)][1].index for x in arguments if id(x) in self._known)
            output = forward(*args, **kwargs)
            self._draws.check(path)
            self._stack.pop()
            self._finish(call, arguments, output)
            return output

        return watched

    def _finish(self, call: Call, arguments: Sequence[Any], output: Any) -> None:
        positions: dict[int, int] = {}
        for position, argument in enumerate(arguments):
            positions.setdefault(id(argument), position)
        leaves: list[TensorLeaf | ObjectLeaf] = []
        unknown = False
        changed = self._changed_outside.pop(call.index, {})
        outputs, structure = take_apart(output)
        for leaf in outputs:
            if isinstance(leaf, Tensor):
                was_changed = changed.pop(id(leaf), None) is not None
                leaves.append(TensorLeaf(self._value(leaf).index, positions.get(id(leaf)), was_changed))
            elif isinstance(leaf, _PLAIN):
                leaves.append(ObjectLeaf(leaf, None))
            elif id(leaf) in positions:
                leaves.append(ObjectLeaf(None, positions[id(leaf)]))
            else:
                unknown = True
        call.last_section, call.end = self._section, len(self.graph.calls)
        if not unknown and not changed:
            call.structure, call.leaves = structure, tuple(leaves)

    def cut_point_passed(self, cut_point: CutPoint, activation: Tensor) -> Tensor:
        """Starts the next section (`varuna.cut_point.PassObserver`)."""
        cut = self._section + 1
        if not isinstance(activation, Tensor):
            raise PartitionError(
                f"cut-point {cut} ({users_code()}) was called on {type(activation).__name__}; it takes one tensor "
                "whose first dimension is the batch"
            )
        if id(cut_point) in self._cut_points:
            raise PartitionError(
                f"the cut-point at {users_code()} is used a second time in one forward; make one CutPoint per place"
            )
        self._cut_points[id(cut_point)] = cut_point
        passed = activation.view_as(activation)  # its own value, so that uses of it and of the original are told apart
        before = self._value(activation)
        value = self._value(passed)
        value.kind, value.cut, value.section, value.same_as = Kind.CUT, cut, cut, before.same_as
        where = f"after {cut_point.place.path}" if isinstance(cut_point, PlacedCutPoint) else value.place
        self.graph.cuts.append(CutPass(f"cut-point {cut} ({where})", value.index))
        self._section = cut
        return passed

    def knows(self, tensor: Tensor) -> bool:
        """Whether the value of `tensor` is known."""
        return self._value(tensor).index in self._shadows

    def finish(self, loss: Tensor) -> Graph:
        """Close the books: `loss` is what the model is trained on."""
        value = self._value(loss)
        self._note_uses([value])
        self.graph.loss = value.index
        for value, tensor in zip(self.graph.values, self._tensors, strict=True):
            value.requires_grad = tensor.requires_grad  # known only after the dispatcher has returned to autograd
        self._note_assigned_buffers()
        return self.graph

    # A second forward on the same copy, of which nothing is kept: does it use what the first left behind?

    @property
    def left_something(self) -> bool:
        """Whether forward has changed attributes of modules, or tensors that are neither buffers nor its own."""
        return self._constants_changed or bool(changed(self._attributes, attributes_of(self._model)))

    def look_again(self, forward: Callable[[], object]) -> None:
        """Call `forward`, which runs the model once more. Raises PartitionError when it depends on the first time."""
        first, operations = attributes_of(self._model), self._operations
        self._born_before, self._operations = len(self.graph.values), []
        self.graph = self.graph.copied()
        self._known = {key: (tensor, self.graph.values[value.index]) for key, (tensor, value) in self._known.items()}
        self._parameters = {name: self.graph.values[value.index] for name, value in self._parameters.items()}
        for name, tensor in self._model.named_buffers():
            if id(tensor) in self._known:
                self._known[id(tensor)][1].buffer = name
        self._section, self._calls_of, self._cut_points = 0, {}, {}
        forward()
        refuse_state(
            self._left_behind,
            self.graph,
            self._tensors,
            lambda tensor: self._known[id(tensor)][1].index >= self._born_before,
            first,
            attributes_of(self._model),
            same_operations=operations == self._operations,
        )

    def _note_assigned_buffers(self) -> None:
        """Buffers that forward has replaced by another tensor: they are changed, too."""
        for path, module in self._model.named_modules():
            for key, tensor in module._buffers.items():
                name = f"{path}.{key}" if path else key
                if tensor is None or name not in self._buffers or tensor is self._buffers[name]:
                    continue
                value = self._value(tensor)
                if value.requires_grad or tensor.shape != self._buffers[name].shape:
                    what = "with its autograd history" if value.requires_grad else f"in another shape, {value.shape}"
                    raise PartitionError(
                        f"forward keeps the tensor made at {value.place} as buffer {name} {what}: assign x.detach(), of "
                        f"the buffer's shape {tuple(self._buffers[name].shape)}"
                    )
                self.graph.buffers_changed[name] = value.place
                self.graph.buffers_used.setdefault(name, set()).add(value.section)

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls are this: autograd asks for it several times an operation
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is _aten.index.Tensor:
            args = self._without_masks(*args)
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [self._fake_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = [] if func.overloadpacket in _SHAPE_ONLY else [self._value(x) for x in leaves if isinstance(x, Tensor)]
        self._note_uses(inputs)
        if func is not _aten.index.Tensor and any(tag in func.tags for tag in _LOOKS_AT_VALUES):
            return self._look_at_values(func, leaves, spec, inputs)
        self._operations.append((func, *(leaf for leaf in leaves if not isinstance(leaf, Tensor))))
        output = self._run_fake(func, leaves, spec)
        args, kwargs = tree_unflatten(leaves, spec)
        where, cost = (self._stack[-1], self._section), cost_of(func, args, kwargs, output)
        self.graph.costs[where] = self.graph.costs.get(where, 0.0) + cost
        random = torch.Tag.nondeterministic_seeded in func.tags
        real = None if random else self._run_shadow(func, leaves, spec, output)
        changed_ones = written(func, args, kwargs)
        if changed_ones:
            self._note_changes(changed_ones, inputs, random, real is not None)
        self._note_outputs(output, real, inputs, random)
        return self._as_given(output)

    def _run_fake(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        try:
            with self._fake_mode:
                return fake_rule(func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._value_needed(func) from error
        except RuntimeError as error:
            error.add_note(f"in the dry run on tensors without values: {func} at {users_code()}")
            raise

    def _run_shadow(self, func: Any, leaves: list[Any], spec: Any, output: Any) -> Any:
        """The operation on real values, when there are all of them; None otherwise."""
        made = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
        if not made or sum(x.numel() for x in made) > _LARGEST_SHADOW:
            return None
        real_leaves = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                shadow = self._shadows.get(self._value(leaf).index)
                if shadow is None and func.overloadpacket in _SHAPE_ONLY and leaf.numel() <= _LARGEST_SHADOW:
                    shadow = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
                if shadow is None:
                    return None
                leaf = shadow
            real_leaves.append(leaf)
        args, kwargs = tree_unflatten(real_leaves, spec)
        return func(*args, **kwargs)

    def _look_at_values(self, func: Any, leaves: list[Any], spec: Any, inputs: list[Value]) -> Any:
        """An operation whose result's shape or kind depends on values (`item`, `nonzero`): only shadows can answer."""
        shadows = [self._shadows.get(value.index) for value in inputs]
        follows = all(shadow is not None for shadow in shadows)
        if follows or looks_at_integers_only(func):
            looked_at = [value for value in inputs if follows or not value.dtype.is_floating_point]
            real_leaves = [self._shadow_or_zeros(func, x) if isinstance(x, Tensor) else x for x in leaves]
            args, kwargs = tree_unflatten(real_leaves, spec)
            real = func(*args, **kwargs)
        elif func.overloadpacket is _aten.nonzero and leaves[0].numel() <= _LARGEST_SHADOW:
            looked_at = inputs
            real = rows_of_any(leaves[0], self._pick_all)
        else:
            raise self._value_needed(func)
        self.graph.looked_at.update((value.index, self._section, self._stack[-1]) for value in looked_at)
        if any(value.dependent for value in looked_at):
            self.graph.choosing.setdefault(self._stack[-1], users_code())
        made, out_spec = tree_flatten(real)
        output = tree_unflatten([self._fake(x) if isinstance(x, Tensor) else x for x in made], out_spec)
        self._note_outputs(output, real if looked_at == inputs else None, inputs, random=False)
        return output

    def _shadow_or_zeros(self, func: Any, tensor: Tensor) -> Tensor:
        """`func` looks at integers only: zeros will do for the others."""
        shadow = self._shadows.get(self._value(tensor).index)
        if shadow is None and not tensor.dtype.is_floating_point:
            raise self._value_needed(func)
        return shadow if shadow is not None else torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _value_needed(self, func: Any) -> PartitionError:
        return PartitionError(
            f"forward looks at the value of a tensor that depends on parameters or on a random draw ({func} at "
            f"{users_code()}, section {self._section}); the path through a cut model may only depend on its inputs"
        )

    def _without_masks(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """`tensor[mask]` as `tensor[mask.nonzero()]`: how many rows there are follows from the mask's shadow."""
        plain: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                with self:
                    plain.extend(index.nonzero().unbind(1))
            else:
                plain.append(index)
        return tensor, plain

    # Books

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
            self._by_storage.setdefault(_storage(tensor), []).append(tensor)
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
            for tensor in self._by_storage[_storage(changed)]:
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


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
