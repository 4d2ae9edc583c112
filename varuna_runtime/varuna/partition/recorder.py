"""The dry run's recorder: writes down values, module calls and cut-points as the user's forward runs on fake tensors.

It sits at the dispatcher, below autograd and composite functions, so it sees every operation with a regular schema,
custom autograd functions and activation checkpointing included. Tensors are fake (no memory, no arithmetic); those that
follow from the inputs alone also have a real *shadow*, so code that looks at input values (`if mask.all():`) runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from varuna.cut_point import CutPoint
from varuna.partition.books import Books, storage_of
from varuna.partition.choices import rows_of_any
from varuna.partition.costs import cost_of
from varuna.partition.cut_places import PlacedCutPoint
from varuna.partition.draws import is_draw, shape_of_draw
from varuna.partition.errors import PartitionError
from varuna.partition.fake_rules import fake_rule, looks_at_integers_only
from varuna.partition.graph import Call, CutPass, Draw, Graph, Kind, ObjectLeaf, TensorLeaf, Value
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


class Recorder(TorchDispatchMode, Books):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Records one dry run into `graph`.

    `pick_all`: masks over computed values pick all rows, else fewer (choices.py).
    """

    def __init__(self, batch: int, pick_all: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        Books.__init__(self, batch)
        self._pick_all = pick_all
        self._calls_of: dict[str, int] = {}
        self._cut_points: dict[int, CutPoint] = {}
        self._model = nn.Module()  # that is watched
        self._draws = GlobalDraws()
        # For a second forward on the same copy: what the first left behind.
        self._attributes: Attributes = {}
        self._operations: list[tuple[Any, ...]] = []
        self._made_like: dict[int, int] = {}  # tensors, by id, made in the shape of a value
        self._aside = False

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

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For around operations that are not the model's."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def opaque_called(self, metas: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like `metas`, which a kernel has made of `tensors` (`varuna.opaque`)."""
        fakes = [self._fake_of(tensor) for tensor in tensors]
        inputs = [self._value(fake) for fake in fakes]
        self._note_uses(inputs)
        made = [self._fake(meta) for meta in metas]
        self._operations.append(("opaque", tuple(tuple(meta.shape) for meta in metas)))
        where = (self._stack[-1], self._section)
        # As a product with the largest of them would be: nobody knows what the kernel does.
        rows = max((meta.numel() // max(meta.shape[-1], 1) for meta in metas if meta.dim()), default=1)
        cost = 2.0 * rows * max((x.numel() for x in tensors if isinstance(x, nn.Parameter)), default=0)
        self.graph.costs[where] = self.graph.costs.get(where, 0.0) + cost
        self._note_outputs(made, None, inputs, random=False)
        return made

    @property
    def running_module(self) -> str:
        """The path of the innermost module that has not returned."""
        return self.graph.calls[self._stack[-1]].path if self._stack[-1] >= 0 else ""

    def knows(self, tensor: Tensor) -> bool:
        """Whether the value of `tensor` is known."""
        return self._value(tensor).index in self._shadows

    def finish(self, loss: Tensor, beside: Tensor | float | None = None) -> Graph:
        """Close the books: `loss` is what the model is trained on; `beside`: what may be its weight."""
        value = self._value(loss)
        self._note_uses([value])
        self.graph.loss = value.index
        if isinstance(beside, Tensor):
            weight = self._value(beside)
            self.graph.weighted = not weight.requires_grad and not self._depends_on_parameters(weight)
            if self.graph.weighted:
                self._note_uses([weight])
        else:
            self.graph.weighted = beside is not None
        for value, tensor in zip(self.graph.values, self._tensors, strict=True):
            value.requires_grad = tensor.requires_grad  # known only after the dispatcher has returned to autograd
        self._note_assigned()
        return self.graph

    def _depends_on_parameters(self, value: Value) -> bool:
        seen: set[int] = set()
        left = [value.index]
        while left:
            index = left.pop()
            if index in seen:
                continue
            seen.add(index)
            if self.graph.values[index].kind is Kind.PARAMETER:
                return True
            left += self.graph.values[index].parents
        return False

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

    def _note_assigned(self) -> None:
        """What forward has replaced by another tensor: a buffer is changed by that, a parameter must not be."""
        for path, module in self._model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and self._memory.get(id(parameter)) != storage_of(parameter):
                    raise PartitionError(
                        f"forward replaces parameter {f'{path}.{key}' if path else key}, or its .data: no optimizer "
                        "would train it, and replicas would each have their own. Compute another tensor from it"
                    )
            for key, tensor in module._buffers.items():
                name = f"{path}.{key}" if path else key
                if tensor is not None and name in self._buffers:
                    self._note_assigned_buffer(name, tensor)

    def _note_assigned_buffer(self, name: str, tensor: Tensor) -> None:
        original = self._buffers[name]
        if tensor is original:
            if storage_of(tensor) != self._memory[id(tensor)]:
                self.graph.buffers_changed.setdefault(name, "by its .data")
            return
        value = self._value(tensor)
        if value.requires_grad or tensor.shape != original.shape:
            what = "with its autograd history" if value.requires_grad else f"in another shape, {value.shape}"
            raise PartitionError(
                f"forward keeps the tensor made at {value.place} as buffer {name} {what}: assign x.detach(), of the "
                f"buffer's shape {tuple(original.shape)}"
            )
        self.graph.buffers_changed[name] = value.place
        self.graph.buffers_used.setdefault(name, set()).add(value.section)

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._aside:
            return func(*args, **(kwargs or {}))
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
        self._note_draw(func, leaves, spec, output)
        changed_ones = written(func, args, kwargs)
        if changed_ones:
            self._note_changes(changed_ones, inputs, random, real is not None)
        self._note_outputs(output, real, inputs, random)
        return self._as_given(output)

    def _note_draw(self, func: Any, leaves: list[Any], spec: Any, output: Any) -> None:
        """Before its values are noted: what a draw in place is like, it was before."""
        tensors = [self._value(x).index for x in leaves if isinstance(x, Tensor)]
        like = tensors[0] if tensors else -1
        if func.overloadpacket in _SHAPE_ONLY and isinstance(output, Tensor):
            self._made_like[id(output)] = like
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        args, kwargs = tree_unflatten(leaves, spec)
        arguments = {**dict(zip((x.name for x in func._schema.arguments), args, strict=False)), **kwargs}
        if is_draw(func, arguments):
            made = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
            first = next((x for x in leaves if isinstance(x, Tensor)), None)
            like = self._made_like.get(id(first), like)
            shape = shape_of_draw(func, arguments, made)
            draw = Draw(func, self._section, self._stack[-1], shape, like, users_code())
            self.graph.draws.append(draw)

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
