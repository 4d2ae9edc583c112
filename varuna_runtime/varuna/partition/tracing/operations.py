"""The operations of a dry run, recorded as the user's forward runs them on fake tensors.

The recorder sits at the dispatcher, below autograd and composite functions, so that it sees every operation with a
regular schema, custom autograd functions and activation checkpointing included. Tensors are fake (no memory, no
arithmetic). Those that follow from the inputs alone also have a real *shadow*, so that code runs which looks at input
values (`if mask.all():`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

from varuna.diagnostics.user_code import user_code
from varuna.partition.cutting.graph import RandomDraw, Value
from varuna.partition.errors import PartitionError
from varuna.partition.tracing.choosing_modules import pick_rows
from varuna.partition.tracing.fake_results import FakeResults
from varuna.partition.tracing.fake_rules import looks_at_integers_only
from varuna.partition.tracing.in_place_writes import written_tensors
from varuna.partition.tracing.number_needs import needs_numbers
from varuna.partition.tracing.operation_calls import OperationCall, replace_tensors, tensors_in
from varuna.partition.tracing.operation_costs import operation_cost
from varuna.partition.tracing.random_draws import is_draw, shape_of_draw
from varuna.partition.tracing.value_table import ValueTable

__all__ = ["OperationRecorder"]

_aten = torch.ops.aten
# These use only the shape, dtype and device of a tensor, which are right in a ghost's output.
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
_LARGEST_SHADOW = 1 << 20  # elements; larger masks are not worth their memory, and code rarely looks at them


class OperationRecorder(TorchDispatchMode, ValueTable):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Records the operations that run in a `with` block.

    `pick_all`: whether masks over computed values pick all rows, or fewer (choosing_modules.py).
    """

    def __init__(self, batch: int, pick_all: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        ValueTable.__init__(self, batch)
        self._pick_all = pick_all
        self._results = FakeResults(self._fake_mode)
        self._operations: list[tuple[Any, ...]] = []
        self._made_like: dict[int, int] = {}  # by the id of a tensor: the value that gave it its shape
        self._aside = False

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """A context for operations that are not the model's."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def record_opaque_call(self, metas: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fakes like `metas`, for the outputs of an opaque kernel that is called with `tensors` (`varuna.opaque`)."""
        fakes = [self._fake_of(tensor) for tensor in tensors]
        inputs = [self._value(fake) for fake in fakes]
        self._record_uses(inputs)
        self._record_reads(inputs)
        made = [self._fake(meta) for meta in metas]
        self._operations.append(("opaque", tuple(tuple(meta.shape) for meta in metas)))
        where = (self._stack[-1], self._section)
        # The cost of a product with the largest parameter, because what the kernel does is unknown.
        rows = max((meta.numel() // max(meta.shape[-1], 1) for meta in metas if meta.dim()), default=1)
        cost = 2.0 * rows * max((x.numel() for x in tensors if isinstance(x, nn.Parameter)), default=0)
        self.graph.costs[where] = self.graph.costs.get(where, 0.0) + cost
        self._record_outputs(made, None, inputs, random=False)
        return made

    def knows_value(self, tensor: Tensor) -> bool:
        """Whether the dry run knows the value of `tensor`."""
        return self._value(tensor).index in self._shadows

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._aside:
            return func(*args, **(kwargs or {}))
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls: autograd makes several for each operation
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is _aten.index.Tensor:
            args = self._without_masks(*args)
        args, kwargs = replace_tensors((args, kwargs), self._fake_of)
        call = OperationCall(func, args, kwargs, tensors_in((args, kwargs)))
        inputs = [] if func.overloadpacket in _SHAPE_ONLY else [self._value(x) for x in call.tensors]
        self._record_uses(inputs)
        if func is not _aten.index.Tensor and any(tag in func.tags for tag in _LOOKS_AT_VALUES):
            self._record_reads(inputs)
            return self._look_at_values(call, inputs)
        self._operations.append((func, replace_tensors((args, kwargs), lambda _: None)))
        output = self._run_fake(call)
        if needs_numbers(func, inputs, tensors_in(output)):
            self.graph.need_numbers.add((self._section, self._stack[-1]))
        where, cost = (self._stack[-1], self._section), operation_cost(func, args, kwargs, output)
        self.graph.costs[where] = self.graph.costs.get(where, 0.0) + cost
        random = torch.Tag.nondeterministic_seeded in func.tags
        real = None if random else self._run_shadow(call, output)
        self._record_draw(call, output)
        if not self._are_views(output, inputs):
            self._record_reads(inputs)
        written = written_tensors(func, args, kwargs)
        if written:
            self._record_changes(written, inputs, random, real is not None)
        self._record_outputs(output, real, inputs, random)
        return self._as_given(output)

    def _record_draw(self, call: OperationCall, output: Any) -> None:
        """Record a random draw. Called before the outputs are recorded, because a draw in place keeps the old shape."""
        func = call.func
        first = call.tensors[0] if call.tensors else None
        like = self._value(first).index if first is not None else -1
        if func.overloadpacket in _SHAPE_ONLY and isinstance(output, Tensor):
            self._made_like[id(output)] = like
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        arguments = {**dict(zip((x.name for x in func._schema.arguments), call.args, strict=False)), **call.kwargs}
        if is_draw(func, arguments):
            like = self._made_like.get(id(first), like)
            shape = shape_of_draw(func, arguments, tensors_in(output))
            draw = RandomDraw(func, self._section, self._stack[-1], shape, like, user_code())
            self.graph.draws.append(draw)

    def _run_fake(self, call: OperationCall) -> Any:
        try:
            return self._results.run(call)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._value_needed(call.func) from error
        except RuntimeError as error:
            error.add_note(f"in the dry run on tensors without values: {call.func} at {user_code()}")
            raise

    def _run_shadow(self, call: OperationCall, output: Any) -> Any:
        """The operation on real values; None where one of them is unknown."""
        made = tensors_in(output)
        if not made or sum(x.numel() for x in made) > _LARGEST_SHADOW:
            return None
        shadows: dict[int, Tensor] = {}
        for tensor in call.tensors:
            shadow = self._shadows.get(self._value(tensor).index)
            if shadow is None and call.func.overloadpacket in _SHAPE_ONLY and tensor.numel() <= _LARGEST_SHADOW:
                shadow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if shadow is None:
                return None
            shadows[id(tensor)] = shadow
        return call.run_with(lambda tensor: shadows[id(tensor)])

    def _look_at_values(self, call: OperationCall, inputs: list[Value]) -> Any:
        """An operation whose result's shape or kind depends on values (`item`, `nonzero`): it runs on the shadows."""
        func = call.func
        follows = all(value.index in self._shadows for value in inputs)
        if follows or looks_at_integers_only(func):
            looked_at = [value for value in inputs if follows or not value.dtype.is_floating_point]
            real = call.run_with(lambda tensor: self._shadow_or_zeros(func, tensor))
        elif func.overloadpacket is _aten.nonzero and call.tensors[0].numel() <= _LARGEST_SHADOW:
            looked_at = inputs
            real = pick_rows(call.tensors[0], self._pick_all)
        else:
            raise self._value_needed(func)
        self.graph.looked_at.update((value.index, self._section, self._stack[-1]) for value in looked_at)
        if any(value.dependent for value in looked_at):
            self.graph.choosing.setdefault(self._stack[-1], user_code())
        output = replace_tensors(real, self._fake)
        self._record_outputs(output, real if looked_at == inputs else None, inputs, random=False)
        return output

    def _shadow_or_zeros(self, func: Any, tensor: Tensor) -> Tensor:
        """The shadow of `tensor`, or zeros for floating-point tensors, whose values `func` does not use."""
        shadow = self._shadows.get(self._value(tensor).index)
        if shadow is None and not tensor.dtype.is_floating_point:
            raise self._value_needed(func)
        return shadow if shadow is not None else torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _value_needed(self, func: Any) -> PartitionError:
        return PartitionError(
            f"forward looks at the value of a tensor that depends on parameters or on a random draw ({func} at "
            f"{user_code()}, section {self._section}); the path through a cut model may only depend on its inputs"
        )

    def _without_masks(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """`tensor[mask]` as `tensor[mask.nonzero()]`: the mask's shadow gives the number of rows."""
        plain: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                with self:
                    plain.extend(index.nonzero().unbind(1))
            else:
                plain.append(index)
        return tensor, plain
