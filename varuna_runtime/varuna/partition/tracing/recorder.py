"""The recorder of a dry run: module calls, cut-points, and what a forward leaves for the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varuna.cut_point import CutPoint
from varuna.diagnostics.user_code import user_code
from varuna.partition.cutting.graph import (
    CutRecord,
    Graph,
    ModuleCall,
    ObjectLeaf,
    TensorLeaf,
    Value,
    ValueKind,
)
from varuna.partition.cutting.placed_cut_points import PlacedCutPoint
from varuna.partition.errors import PartitionError
from varuna.partition.model_io.structure import flatten_nested
from varuna.partition.tracing.backward_nodes import backward_nodes
from varuna.partition.tracing.carried_state import (
    GlobalGenerators,
    ModuleAttributes,
    attributes_of,
    changed_attributes,
    refuse_carried_state,
)
from varuna.partition.tracing.operation_calls import storage_of
from varuna.partition.tracing.operations import OperationRecorder
from varuna.partition.tracing.plain_numbers import KeptNumbers

__all__ = ["Recorder"]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Recorder(OperationRecorder):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Records one dry run into `graph`."""

    def __init__(self, batch: int, pick_all: bool = True) -> None:
        super().__init__(batch, pick_all)
        self._calls_of: dict[str, int] = {}
        self._cut_points: dict[int, CutPoint] = {}
        self._model = nn.Module()  # replaced by the one that is watched
        self._generators = GlobalGenerators()
        self._attributes: ModuleAttributes = {}  # before the first forward
        self._kept_numbers = KeptNumbers(self._record_number_read)

    def watch_calls(self, model: nn.Module) -> None:
        """Record every call of every module of `model`, a copy of the user's model that this changes."""
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
            call = ModuleCall(
                index=len(self.graph.calls),
                path=path,
                number=number,
                parent=self._stack[-1],
                owns_parameters=owns_parameters,
                first_section=self._section,
            )
            self.graph.calls.append(call)
            self._stack.append(call.index)
            arguments = flatten_nested((args, kwargs))[0]
            call.arguments = tuple(self._known[id(x)][1].index for x in arguments if id(x) in self._known)
            numbers = self._kept_numbers.list_numbers(module)
            output = forward(*args, **kwargs)
            self._generators.check_unchanged(path)
            self._stack.pop()
            self._kept_numbers.record_call(call, module, numbers)
            self._finish_call(call, arguments, output)
            return output

        return watched

    def _record_number_read(self, set_by: int, name: str) -> None:
        for call in self._returned_calls(set_by):
            call.must_run = f"sets {name}, which other code reads"

    def _finish_call(self, call: ModuleCall, arguments: Sequence[Any], output: Any) -> None:
        positions: dict[int, int] = {}
        for position, argument in enumerate(arguments):
            positions.setdefault(id(argument), position)
        leaves: list[TensorLeaf | ObjectLeaf] = []
        unknown = False
        changed = self._changed_outside.pop(call.index, {})
        outputs, structure = flatten_nested(output)
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
                f"cut-point {cut} ({user_code()}) was called on {type(activation).__name__}; it takes one tensor "
                "whose first dimension is the batch"
            )
        if id(cut_point) in self._cut_points:
            raise PartitionError(
                f"the cut-point at {user_code()} is used a second time in one forward; make one CutPoint per place"
            )
        self._cut_points[id(cut_point)] = cut_point
        passed = activation.view_as(activation)  # a value of its own, to distinguish its uses from the original's
        before = self._value(activation)
        value = self._value(passed)
        value.kind, value.cut, value.section, value.same_as = ValueKind.CUT, cut, cut, before.same_as
        where = f"after {cut_point.place.path}" if isinstance(cut_point, PlacedCutPoint) else value.place
        self.graph.cuts.append(CutRecord(f"cut-point {cut} ({where})", value.index))
        self._section = cut
        return passed

    @property
    def running_module(self) -> str:
        """The path of the innermost module that is running."""
        return self.graph.calls[self._stack[-1]].path if self._stack[-1] >= 0 else ""

    def finish_run(self, loss: Tensor, beside: Tensor | float | None = None) -> Graph:
        """End the recording. `beside`: what forward returned behind the loss, which may be its weight."""
        value = self._value(loss)
        self._record_uses([value])
        self.graph.loss = value.index
        if isinstance(beside, Tensor):
            weight = self._value(beside)
            self.graph.weighted = not weight.requires_grad and not self._depends_on_parameters(weight)
            if self.graph.weighted:
                self._record_uses([weight])
                self._record_reads([weight])
        else:
            self.graph.weighted = beside is not None
        for value, tensor in zip(self.graph.values, self._tensors, strict=True):
            value.requires_grad = tensor.requires_grad  # known only after the dispatcher has returned to autograd
        self._record_gradients(loss)
        self._record_assigned()
        return self.graph

    def _record_gradients(self, loss: Tensor) -> None:
        """Record to which values the loss's backward comes: not to what the code detaches."""
        nodes = backward_nodes(loss)
        reached = {
            value.same_as
            for value, tensor in zip(self.graph.values, self._tensors, strict=True)
            # The history of a tensor that is changed is that of its newest value.
            if value.requires_grad and (value.changed_in_place or tensor.grad_fn is None or tensor.grad_fn in nodes)
        }
        for value in self.graph.values:
            value.gets_gradient = value.requires_grad and value.same_as in reached

    def _depends_on_parameters(self, value: Value) -> bool:
        seen: set[int] = set()
        left = [value.index]
        while left:
            index = left.pop()
            if index in seen:
                continue
            seen.add(index)
            if self.graph.values[index].kind is ValueKind.PARAMETER:
                return True
            left += self.graph.values[index].parents
        return False

    # A second forward on the same copy shows whether it uses what the first left behind. Its graph is dropped.

    @property
    def has_left_state(self) -> bool:
        """Whether forward has changed attributes of modules, or constants that it holds."""
        return self._constants_changed or bool(changed_attributes(self._attributes, attributes_of(self._model)))

    def check_second_forward(self, forward: Callable[[], object]) -> None:
        """Call `forward`, which runs the model again. Raises PartitionError when it depends on the first run."""
        first, operations = attributes_of(self._model), self._operations
        self._first_forward_end, self._operations = len(self.graph.values), []
        self.graph = self.graph.make_copy()
        self._known = {key: (tensor, self.graph.values[value.index]) for key, (tensor, value) in self._known.items()}
        self._parameters = {name: self.graph.values[value.index] for name, value in self._parameters.items()}
        for name, tensor in self._model.named_buffers():
            if id(tensor) in self._known:
                self._known[id(tensor)][1].buffer = name
        self._section, self._calls_of, self._cut_points = 0, {}, {}
        forward()
        refuse_carried_state(
            self._carried,
            self.graph,
            self._tensors,
            changed_again=lambda tensor: self._known[id(tensor)][1].index >= self._first_forward_end,
            first=first,
            second=attributes_of(self._model),
            same_operations=operations == self._operations,
        )

    def _record_assigned(self) -> None:
        """Record the buffers that forward has assigned; raise PartitionError for parameters that it has assigned."""
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
                    self._record_assigned_buffer(name, tensor)

    def _record_assigned_buffer(self, name: str, tensor: Tensor) -> None:
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
        if value.input is not None:
            value.read_at.add((0, -1))  # by every stage: the buffer's owner may be any of them
        self.graph.buffers_changed[name] = value.place
        self.graph.buffers_used.setdefault(name, set()).add(value.section)
