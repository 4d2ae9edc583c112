"""A stage: a run of neighbouring sections of the user's model, executed by the user's own forward."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from varuna.cut_point import CutPoint, observe_cut_points
from varuna.devices.accelerator import is_accelerator
from varuna.partition.cutting.graph import are_equal_numbers
from varuna.partition.cutting.model_map import ModelMap
from varuna.partition.cutting.placed_cut_points import place_cut_points
from varuna.partition.cutting.shapes import Boundary
from varuna.partition.errors import PartitionError
from varuna.partition.model_io.batch import batch_size_of
from varuna.partition.model_io.loss import loss_and_weight_of, loss_of
from varuna.partition.model_io.structure import flatten_nested
from varuna.partition.stages.forward_replacements import ForwardReplacements
from varuna.partition.stages.ghost import HollowTensors, allocate_buffers, inject, number_for, overwrite
from varuna.partition.stages.wiring import CallPlan, plan_wiring
from varuna.partition.stages.written_buffers import WrittenBuffers

__all__ = ["Stage"]


def _refuse_reentrant_checkpoint(cut: int) -> None:
    """Raises PartitionError when the code that passes this cut-point runs in a reentrant checkpoint.

    A reentrant checkpoint runs code without gradients, so that what a stage sends or receives there would silently have
    none.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise PartitionError(
                f"a stage ends at cut-point {cut}, within a part of the model that runs in a reentrant checkpoint: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        frame = frame.f_back


def _compare_numbers(path: str, call: CallPlan, leaves: Sequence[Any], batch: int) -> None:
    """Raises PartitionError where module `path` has returned another number than ghosts of later stages return."""
    for position, leaf in call.numbers:
        expected = number_for(leaf, batch)
        actual = leaves[position] if position < len(leaves) else None
        if isinstance(actual, Tensor) or not are_equal_numbers(actual, expected):
            returned = "a tensor" if isinstance(actual, Tensor) else repr(actual)
            raise PartitionError(
                f"module {path} has returned {returned} beside its tensors, and {expected!r} is what later stages, "
                "which do not run it, know from the dry run. Return the number as a tensor, or compute it in forward "
                f"outside of {path}"
            )


class _StageEndError(BaseException):
    """Leaves the user's forward at the end of the stage. Not an Exception, so that the user's handlers let it pass."""


class _ForwardRun:
    """The state of one run of the forward."""

    __slots__ = ("again", "batch", "calls", "received", "section", "sent", "with_grad")

    def __init__(self, batch: int, received: Sequence[Tensor], sends: int, again: bool = False) -> None:
        self.batch = batch
        self.received = received
        self.again = again  # in a backward, where activation checkpointing runs parts of the forward again
        self.with_grad = torch.is_grad_enabled()
        self.section = 0
        self.calls: dict[str, int] = defaultdict(int)
        self.sent: list[Tensor | None] = [None] * sends


class Stage:
    """Sections `sections` of a model on one device. Made by `varuna.partition.build_stage`.

    ModuleAttributes:
        module: the copy of the model that the stage runs, whose other parameters are placeholders without memory. Use
            it for `train()`, `eval()` and attributes, but call `forward` of the stage, not of the module.
        parameters: every parameter that its sections use, by first name.
        buffers: every buffer that its sections use, by first name.
        read: these buffers, and those of earlier sections whose code runs here too.
        written: the buffers of the stage that forward writes.
        weighted: whether forward returns the loss's weight behind the loss.
        receives, sends: the boundaries before and after it, in the order of the lists that `forward` takes and returns.
        shared: all parameters of the model that more than one section uses, with those sections. The gradients of a
            parameter that several stages hold must be summed over these stages.
        on_section: called with the number of each of the stage's own sections as it starts (to seed random streams).
        first_sections: by parameter, the first section that uses it, where that is known.
        before_section: called in forwards with each of the stage's own sections before its code runs; with the first
            one before any code does.
    """

    def __init__(
        self,
        module: nn.Module,
        model_map: ModelMap,
        *,
        sections: range,
        device: torch.device,
        parameters: dict[str, nn.Parameter],
        read: dict[str, Tensor],
    ) -> None:
        """`read`: every buffer that the forward reads in this stage, by first name."""
        own = {name for section in sections for name in model_map.sections[section].buffers}
        count = len(model_map.sections)
        self.module = module
        self.sections = sections
        self.device = device
        self.is_first = sections.start == 0
        self.is_last = sections.stop == count
        self.parameters = parameters
        self.buffers = {name: buffer for name, buffer in read.items() if name in own}
        self.read = read
        self.on_section: Callable[[int], None] | None = None
        self.before_section: Callable[[int], None] | None = None
        self._pass: _ForwardRun | None = None
        self._cut_points: list[CutPoint] = []
        """Those that know of this stage."""
        self._replacements = ForwardReplacements()
        self.apply_map(model_map)

    def apply_map(self, model_map: ModelMap) -> None:
        """Runs the stage from now on by `model_map`: the same sections, traced again (`tracing.trace.trace_again`)."""
        self._replacements.restore_forwards()
        allocate_buffers(self.module, model_map.graph.buffers_changed)
        changed = model_map.graph.buffers_changed
        self.written = WrittenBuffers(
            self.module, {name: buffer for name, buffer in self.buffers.items() if name in changed}
        )
        self.weighted = model_map.graph.weighted
        self._hollow = HollowTensors(self.device, needs_numbers=model_map.needs_numbers)
        self.shared = dict(model_map.shared)
        self.receives: tuple[Boundary, ...] = () if self.is_first else model_map.find_boundary(self.sections.start)
        self.sends: tuple[Boundary, ...] = () if self.is_last else model_map.find_boundary(self.sections.stop)
        self._inputs_read = model_map.inputs_read(self.sections)
        # Code that looks at values may use a parameter in another section than in the dry run.
        self.first_sections = {} if self._inputs_read is None else model_map.first_uses()
        self._wiring = plan_wiring(model_map, self.sections)
        self._replace_forwards()
        with self._replacements.recording_changes(self.module):
            place_cut_points(self.module, model_map.cut_places)

    def release_module(self) -> None:
        """Ends the use of the module, which another stage is to run. This one runs no more."""
        self._replacements.restore_forwards()
        for cut_point in self._cut_points:
            cut_point.again = None
        self._cut_points.clear()

    def empty_unread_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """For training passes: the inputs, with others in place of tensors that the stage never reads.

        These are on its accelerator, where they take no memory, and have the shapes and types of the tensors. A model
        that reads them later than in the dry run gets a loss that is not a number, or an error. On a CPU nothing is
        copied, so the inputs stay as they are. In an evaluation the model may read other inputs.
        """
        if not is_accelerator(self.device):
            return dict(inputs)

        def empty(leaf: Any) -> Any:
            return self._hollow.make_unread(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf

        read = self.list_read_inputs(inputs)
        return {name: value if name in read else tree_map(empty, value) for name, value in inputs.items()}

    def list_read_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that the stage reads in training passes."""
        read = self._inputs_read
        return {name: value for name, value in inputs.items() if read is None or name in read}

    def forward(self, inputs: Mapping[str, Any], received: Sequence[Tensor]) -> list[Tensor] | Tensor:
        """Run the stage on one micro-batch.

        Args:
            inputs: the model's inputs, the same in every stage of the replica, on this device.
            received: the tensors from the stage before, as leaves that require gradients where `receives` has it, of
                the types on the wire.

        Returns:
            The tensors to send, in the order of `sends`. The last stage returns the scalar loss, or a list of loss and
            weight if the model returns a weight. A received tensor that is relayed is returned itself (or, of another
            type on the wire, a copy), so that its gradient is the sum over later stages and this one.

        Raises:
            PartitionError: the forward took another path than in the dry run, or a boundary has another shape.
        """
        if len(received) != len(self.receives):
            raise PartitionError(
                f"the stage takes {len(self.receives)} tensors from the one before, not {len(received)}"
            )
        running = self._pass = _ForwardRun(batch_size_of(inputs), self._as_made(received), len(self.sends))
        if self.before_section is not None:
            self.before_section(self.sections.start)
        if self.is_first and self.on_section is not None:
            self.on_section(0)
        try:
            with observe_cut_points(self):
                result = self.module(**inputs)
        except _StageEndError:
            return self._outgoing(running)
        finally:
            self._pass = None
        if not self.is_last or running.section != self.sections.stop - 1:
            raise PartitionError(
                f"forward returned after {running.section} cut-points; in the dry run it passed more, and this stage "
                f"ends with section {self.sections.stop - 1}. The path through the model may not change between calls"
            )
        return loss_and_weight_of(result) if self.weighted else loss_of(result)

    @contextmanager
    def running_again(self, inputs: Mapping[str, Any], received: Sequence[Tensor]) -> Iterator[None]:
        """A context for the backward of a micro-batch, with the arguments that its `forward` had.

        Activation checkpointing in the user's model runs parts of the forward again there. Cut-points and ghosts in
        these parts then do the same as in the forward, and `on_section` is called.
        """
        self._pass = _ForwardRun(batch_size_of(inputs), self._as_made(received), len(self.sends), again=True)
        try:
            yield
        finally:
            self._pass = None

    def cut_point_passed(self, cut_point: CutPoint, activation: Tensor) -> Tensor:
        """At each cut-point: inject the received tensor, keep the one to send, leave at the end of the stage."""
        running = self._running()
        section = running.section = running.section + 1
        if cut_point.again is None:
            cut_point.again = partial(self._cut_point_passed_again, section)
            self._cut_points.append(cut_point)
        if running.with_grad and not torch.is_grad_enabled() and section in (self.sections.start, self.sections.stop):
            _refuse_reentrant_checkpoint(section)
        return self._at_cut_point(running, section, activation)

    def _cut_point_passed_again(self, section: int, activation: Tensor) -> Tensor:
        running = self._pass
        if running is None:
            return activation  # a backward that no engine runs
        if section == self.sections.stop:
            # By default, PyTorch stops as soon as it has what the backward needs, which is before the stage's end.
            raise PartitionError(
                f"a stage ends at cut-point {section}, within a part of the model that activation checkpointing runs "
                "again to its end: leave torch.utils.checkpoint.set_checkpoint_early_stop as it is"
            )
        return self._at_cut_point(running, section, activation)

    def _at_cut_point(self, running: _ForwardRun, section: int, activation: Tensor) -> Tensor:
        slot = self._wiring.cut_slots.get(section)
        if slot is not None and section in self._wiring.overwritten:
            activation = overwrite(activation, running.received[slot[0]])
        elif slot is not None:
            activation = inject(running.received[slot[0]], slot[1])
        keep = self._wiring.cut_keeps.get(section)
        if keep is not None:
            running.sent[keep] = activation
        if section == self.sections.stop:
            raise _StageEndError
        if section >= self.sections.start:
            if self.before_section is not None and not running.again:
                self.before_section(section)
            if self.on_section is not None:
                self.on_section(section)
        return activation

    def _running(self) -> _ForwardRun:
        assert self._pass is not None, "a stage observes cut-points only while its forward runs"
        return self._pass

    def _guarded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None:
                raise PartitionError(
                    "a stage holds only a part of the model: call Stage.forward, not the stage's module"
                )
            return forward(*args, **kwargs)

        return guarded

    def _as_made(self, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """What was received, with the types that it has in the model."""
        pairs = zip(received, self.receives, strict=True)
        return [tensor if boundary.made_as is None else tensor.to(boundary.made_as) for tensor, boundary in pairs]

    def _outgoing(self, running: _ForwardRun) -> list[Tensor]:
        for received, sent in self._wiring.relays:
            running.sent[sent] = running.received[received]
        tensors: list[Tensor] = []
        for tensor, boundary in zip(running.sent, self.sends, strict=True):
            expected = boundary.shape_for(running.batch)
            if tensor is None:
                raise PartitionError(
                    f"forward did not produce {boundary.name}, as it did in the dry run: there is nothing to send"
                )
            if tensor.shape != expected:
                raise PartitionError(
                    f"{boundary.name} has shape {tuple(tensor.shape)}, but the dry run expects {expected} for "
                    f"{running.batch} examples. Sizes other than the batch's (sequence length) must be those of the "
                    "example inputs: pad to them"
                )
            made_as = boundary.made_as or boundary.dtype
            if tensor.dtype != made_as:
                raise PartitionError(
                    f"{boundary.name} is {tensor.dtype} on {tensor.device.type}, but was {made_as} in the dry "
                    f"run on the CPU. Make its type explicit before the cut: {boundary.name}.to({made_as})"
                )
            tensors.append(tensor.to(boundary.dtype))
        return tensors

    def _replace_forwards(self) -> None:
        """Replaces the forward of every module that has something to do here."""
        if not (self.is_first and self.is_last):
            self._replacements.replace_forward(self.module, self._guarded(self.module.forward))
        modules = dict(self.module.named_modules())
        for path, calls in self._wiring.calls.items():
            if any(call.ghost is not None or call.keeps or call.numbers for call in calls):
                module = modules[path]
                self._replacements.replace_forward(module, self._wired(path, calls, module.forward))

    def _wired(self, path: str, calls: list[CallPlan], forward: Callable[..., Any]) -> Callable[..., Any]:
        def wired(*args: Any, **kwargs: Any) -> Any:
            running = self._pass
            if running is None:
                return forward(*args, **kwargs)  # a backward that no engine runs
            if running.again:
                if all(call.ghost is None for call in calls):
                    return forward(*args, **kwargs)
                if len(calls) > 1:
                    raise PartitionError(
                        f"module {path} is called {len(calls)} times, and activation checkpointing runs one of the "
                        "calls again, but which one is unknown; leave it out of the checkpointed part"
                    )
                ghost = calls[0].ghost
                assert ghost is not None
                return ghost.make_output(self._hollow, running.batch, running.received, args=args, kwargs=kwargs)
            number = running.calls[path]
            running.calls[path] = number + 1
            if number >= len(calls):
                raise PartitionError(f"module {path} was called more often than in the dry run ({len(calls)} times)")
            call = calls[number]
            if call.ghost is not None:
                running.section = call.last_section
                if running.with_grad and call.ghost.injects_grad and not torch.is_grad_enabled():
                    raise PartitionError(
                        f"module {path} runs without gradients (reentrant activation checkpointing?), but its output "
                        "is used, with gradients, in a later stage; use checkpoint(…, use_reentrant=False)"
                    )
                return call.ghost.make_output(self._hollow, running.batch, running.received, args=args, kwargs=kwargs)
            output = forward(*args, **kwargs)
            if call.keeps or call.numbers:
                leaves = [output] if isinstance(output, Tensor) else flatten_nested(output)[0]
                for leaf, slot in call.keeps:
                    running.sent[slot] = leaves[leaf]
                _compare_numbers(path, call, leaves, running.batch)
            return output

        return wired
