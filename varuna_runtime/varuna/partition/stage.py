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
from torch.utils.checkpoint import CheckpointFunction

from varuna.cut_point import CutPoint, observing
from varuna.partition.batch import batch_size_of, loss_and_weight_of, loss_of
from varuna.partition.cut_places import place_cut_points
from varuna.partition.errors import PartitionError
from varuna.partition.ghost import Ghost, Zeros, give_memory, make_ghost, put_in
from varuna.partition.model_map import ModelMap
from varuna.partition.rewired import Rewired
from varuna.partition.shapes import Boundary
from varuna.partition.structure import take_apart
from varuna.partition.written_buffers import WrittenBuffers

__all__ = ["Stage"]


def _refuse_reentrant_checkpoint(cut: int) -> None:
    """Raises PartitionError when the code that passes this cut-point runs in a reentrant checkpoint.

    That runs it without gradients, so what a stage sends or receives there would have none, and nothing would say so.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise PartitionError(
                f"a stage ends at cut-point {cut}, within a part of the model that runs in a reentrant checkpoint: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        frame = frame.f_back


class _StageEndError(BaseException):
    """Leaves the user's forward at the end of the stage; no Exception, so that his handlers let it pass."""


class _Call:
    """What a stage does at one call of one module: answer as a ghost, or run it and keep parts of its output."""

    __slots__ = ("ghost", "keep", "last_section")

    def __init__(self, ghost: Ghost | None, keep: tuple[tuple[int, int], ...], last_section: int) -> None:
        self.ghost = ghost
        self.keep = keep  # (output leaf, slot in what is sent)
        self.last_section = last_section  # a ghost hides the cut-points inside the module


class _Pass:
    """The state of one forward."""

    __slots__ = ("again", "batch", "calls", "received", "section", "sent", "with_grad")

    def __init__(self, batch: int, received: Sequence[Tensor], sends: int, again: bool = False) -> None:
        self.batch = batch
        self.received = received
        self.again = again  # it is the micro-batch's backward, in which activation checkpointing runs parts again
        self.with_grad = torch.is_grad_enabled()
        self.section = 0
        self.calls: dict[str, int] = defaultdict(int)
        self.sent: list[Tensor | None] = [None] * sends


class Stage:
    """Sections `sections` of a model on one device. Made by `varuna.partition.build_stage`.

    Attributes:
        module: the model copy that the stage runs; its other parameters are placeholders without memory. For `train()`,
            `eval()` and attributes; call `forward` of the stage, not of the module.
        parameters: every parameter that its sections use, by first name.
        buffers: every buffer that its sections use, by first name.
        read: these, and those of earlier sections whose code runs here again.
        written: those of them that forward writes.
        weighted: whether forward returns its loss's weight behind the loss.
        receives, sends: the boundaries before and after it, in the order of the lists that `forward` takes and returns.
        shared: all parameters of the model that more than one section uses, with those sections; the gradients of a
            name that is in `parameters` of several stages are to be summed over them.
        on_section: called with the number of each of the stage's own sections as it starts (to seed random streams).
    """

    def __init__(
        self,
        module: nn.Module,
        model_map: ModelMap,
        sections: range,
        device: torch.device,
        parameters: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
        read: dict[str, Tensor],
    ) -> None:
        count = len(model_map.sections)
        self.module = module
        self.sections = sections
        self.device = device
        self.is_first = sections.start == 0
        self.is_last = sections.stop == count
        self.parameters = parameters
        self.buffers = buffers
        self.read = read
        self.on_section: Callable[[int], None] | None = None
        self._zeros = Zeros(device)
        self._pass: _Pass | None = None
        self._rewired = Rewired()
        self.follow(model_map)

    def follow(self, model_map: ModelMap) -> None:
        """From now on run the stage as `model_map` has it: the same sections, traced again (`retrace.trace_again`)."""
        self._rewired.undo()
        give_memory(self.module, model_map.graph.buffers_changed)
        changed = model_map.graph.buffers_changed
        self.written = WrittenBuffers(
            self.module, {name: buffer for name, buffer in self.buffers.items() if name in changed}
        )
        self.weighted = model_map.graph.weighted
        self.shared = dict(model_map.shared)
        self.receives: tuple[Boundary, ...] = () if self.is_first else model_map.boundary(self.sections.start)
        self.sends: tuple[Boundary, ...] = () if self.is_last else model_map.boundary(self.sections.stop)
        self._cut_slots: dict[int, tuple[int, bool]] = {}  # cut-point -> received slot, whether it is changed in place
        self._overwritten: frozenset[int] = frozenset()  # cut-points whose argument, used later, gets the values too
        self._cut_keeps: dict[int, int] = {}  # cut-point -> sent slot
        self._relays: tuple[tuple[int, int], ...] = ()  # (received slot, sent slot)
        self._wire(model_map)
        with self._rewired.noting(self.module):
            place_cut_points(self.module, model_map.cut_places)

    def forward(self, inputs: Mapping[str, Any], received: Sequence[Tensor]) -> list[Tensor] | Tensor:
        """Run the stage on one micro-batch.

        Args:
            inputs: the model's inputs, the same in every stage of the replica, on this device.
            received: what the stage before sent, as leaves that require gradients where `receives` says so.

        Returns:
            What the stage sends, in the order of `sends`; the last stage: its scalar loss, or, of a model that returns
            its loss's weight, a list of both. A received tensor that is relayed is returned itself, so its gradient
            sums up what later stages and this one contribute.

        Raises:
            PartitionError: the forward took another way than in the dry run, or a boundary got another shape.
        """
        if len(received) != len(self.receives):
            raise PartitionError(
                f"the stage takes {len(self.receives)} tensors from the one before, not {len(received)}"
            )
        running = self._pass = _Pass(batch_size_of(inputs), received, len(self.sends))
        if self.is_first and self.on_section is not None:
            self.on_section(0)
        try:
            with observing(self):
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
        """For around the backward of a micro-batch; arguments as its `forward` had them.

        Activation checkpointing in the user's model runs parts of the forward again there: cut-points and ghosts in
        such a part then do what they did in the forward, and `on_section` is called.
        """
        self._pass = _Pass(batch_size_of(inputs), received, len(self.sends), again=True)
        try:
            yield
        finally:
            self._pass = None

    def cut_point_passed(self, cut_point: CutPoint, activation: Tensor) -> Tensor:
        """At each cut-point: put in what was received, note what will be sent, leave at the end of the stage."""
        running = self._running()
        section = running.section = running.section + 1
        if cut_point.again is None:
            cut_point.again = partial(self._cut_point_passed_again, section)
        if running.with_grad and not torch.is_grad_enabled() and section in (self.sections.start, self.sections.stop):
            _refuse_reentrant_checkpoint(section)
        return self._at_cut_point(running, section, activation)

    def _cut_point_passed_again(self, section: int, activation: Tensor) -> Tensor:
        running = self._pass
        if running is None:
            return activation  # a backward that was not begun by an engine
        if section == self.sections.stop:
            # What the stage's end needs of the part is there before, and there PyTorch stops by default.
            raise PartitionError(
                f"a stage ends at cut-point {section}, within a part of the model that activation checkpointing runs "
                "again to its end: leave torch.utils.checkpoint.set_checkpoint_early_stop as it is"
            )
        return self._at_cut_point(running, section, activation)

    def _at_cut_point(self, running: _Pass, section: int, activation: Tensor) -> Tensor:
        slot = self._cut_slots.get(section)
        if slot is not None and section in self._overwritten:
            activation = activation.copy_(running.received[slot[0]])
        elif slot is not None:
            activation = put_in(running.received[slot[0]], slot[1])
        keep = self._cut_keeps.get(section)
        if keep is not None:
            running.sent[keep] = activation
        if section == self.sections.stop:
            raise _StageEndError
        if section >= self.sections.start and self.on_section is not None:
            self.on_section(section)
        return activation

    def _running(self) -> _Pass:
        assert self._pass is not None, "cut-points tell the stage only while its forward runs"
        return self._pass

    def _guarded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._pass is None:
                raise PartitionError(
                    "a stage holds only a part of the model: call Stage.forward, not the stage's module"
                )
            return forward(*args, **kwargs)

        return guarded

    def _outgoing(self, running: _Pass) -> list[Tensor]:
        for received, sent in self._relays:
            running.sent[sent] = running.received[received]
        tensors: list[Tensor] = []
        for tensor, boundary in zip(running.sent, self.sends, strict=True):
            expected = boundary.shape_for(running.batch)
            if tensor is None:
                raise PartitionError(
                    f"{boundary.name} was not produced, as it was in the dry run; it cannot be sent on"
                )
            if tensor.shape != expected:
                raise PartitionError(
                    f"{boundary.name} has shape {tuple(tensor.shape)}; after the dry run, {expected} was expected for "
                    f"{running.batch} examples. Sizes other than the batch's (sequence length) must be those of the "
                    "example inputs: pad to them"
                )
            if tensor.dtype != boundary.dtype:
                raise PartitionError(
                    f"{boundary.name} is {tensor.dtype} on {tensor.device.type}, but was {boundary.dtype} in the dry "
                    f"run on the CPU. Make its type explicit before the cut: {boundary.name}.to({boundary.dtype})"
                )
            tensors.append(tensor)
        return tensors

    # Wiring: which calls are ghosts, where received tensors go in and sent ones are seen

    def _wire(self, model_map: ModelMap) -> None:
        graph = model_map.graph
        start, stop = self.sections.start, self.sections.stop
        slots: dict[int, int] = {}
        ghosts: frozenset[int] = frozenset()
        if not self.is_first:
            before = model_map.plan(start)
            ghosts = before.ghosts
            self._overwritten = before.overwritten
            slots = {value: slot for slot, value in enumerate(before.transported)}
            for cut in range(1, start + 1):
                value = graph.values[graph.cuts[cut - 1].value]
                if value.same_as in slots:
                    self._cut_slots[cut] = slots[value.same_as], value.changed_in_place
        keeps: dict[int, list[tuple[int, int]]] = defaultdict(list)
        if not self.is_last:
            after = model_map.plan(stop)
            relays = []
            for sent, transported in enumerate(after.transported):
                if transported in slots:
                    relays.append((slots[transported], sent))
                    continue
                for place in after.places[transported]:
                    if place.call < 0:
                        self._cut_keeps[place.cut] = sent
                    else:
                        keeps[place.call].append((place.leaf, sent))
            self._relays = tuple(relays)
        self._wire_calls(model_map, ghosts, slots, keeps)

    def _wire_calls(
        self,
        model_map: ModelMap,
        ghosts: frozenset[int],
        slots: Mapping[int, int],
        keeps: Mapping[int, list[tuple[int, int]]],
    ) -> None:
        """Give every module that has something to do here its list of calls, in order, as they will happen here."""
        calls: dict[str, list[_Call]] = defaultdict(list)
        hidden: set[int] = set()
        for call in model_map.graph.calls:
            if call.parent in hidden or call.parent in ghosts:
                hidden.add(call.index)
            elif call.first_section < self.sections.stop:
                ghost = make_ghost(model_map, call, slots) if call.index in ghosts else None
                calls[call.path].append(_Call(ghost, tuple(keeps.get(call.index, ())), call.last_section))
        if not (self.is_first and self.is_last):
            self._rewired.replace(self.module, self._guarded(self.module.forward))
        modules = dict(self.module.named_modules())
        for path, its_calls in calls.items():
            if any(call.ghost is not None or call.keep for call in its_calls):
                module = modules[path]
                self._rewired.replace(module, self._wired(path, its_calls, module.forward))

    def _wired(self, path: str, calls: list[_Call], forward: Callable[..., Any]) -> Callable[..., Any]:
        def wired(*args: Any, **kwargs: Any) -> Any:
            running = self._pass
            if running is None:
                return forward(*args, **kwargs)  # a backward that was not begun by an engine
            if running.again:
                if all(call.ghost is None for call in calls):
                    return forward(*args, **kwargs)
                if len(calls) > 1:
                    raise PartitionError(
                        f"module {path} is called {len(calls)} times, and activation checkpointing runs one of the "
                        "calls again: which one cannot be told; leave it out of the part that is checkpointed"
                    )
                ghost = calls[0].ghost
                assert ghost is not None
                return ghost.output(self._zeros, running.batch, running.received, args, kwargs)
            number = running.calls[path]
            running.calls[path] = number + 1
            if number >= len(calls):
                raise PartitionError(f"module {path} was called more often than in the dry run ({len(calls)} times)")
            call = calls[number]
            if call.ghost is not None:
                running.section = call.last_section
                if running.with_grad and call.ghost.puts_in_grad and not torch.is_grad_enabled():
                    raise PartitionError(
                        f"module {path} runs without gradients (reentrant activation checkpointing?), but its output "
                        "is used, with gradients, in a later stage; use checkpoint(…, use_reentrant=False)"
                    )
                return call.ghost.output(self._zeros, running.batch, running.received, args, kwargs)
            output = forward(*args, **kwargs)
            if call.keep:
                leaves = [output] if isinstance(output, Tensor) else take_apart(output)[0]
                for leaf, slot in call.keep:
                    running.sent[slot] = leaves[leaf]
            return output

        return wired
