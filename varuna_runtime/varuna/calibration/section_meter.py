"""Time and memory of one section: a stage of that section alone, run on boundary tensors made for the measurement.

A stage runs the whole of the user's forward, with ghosts in place of what other stages run. So a section alone takes
longer than as one of several sections, by what each run of a stage takes. That overhead is measured separately
(`time_stage_overhead`).

Letter: m examples in a micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from varuna.calibration.clock import ComputeClock
from varuna.calibration.saved_tensors import SavedTensors
from varuna.calibration.subject import CalibrationSubject
from varuna.devices.accelerator import is_accelerator, peak_memory_bytes, reset_peak_memory
from varuna.partition import Stage, build_stage
from varuna.partition.cutting.shapes import Boundary
from varuna.partition.model_io.batch import batch_size_of
from varuna.pipeline.random_streams import RandomStreams
from varuna_planner.profile.document import Measurement

__all__ = ["SectionMeter", "measure_in_turn", "time_stage_overhead"]

_FEWEST, _MOST = 3, 30
"""The least and the most repetitions of one measurement; between them the time decides."""

_NO_CACHE_BYTES = 512 * 2**20
"""More than the caches of CPUs and GPUs hold (the largest have some 256 MB for one die's cores)."""


class SectionMeter:
    """Runs a section of a model, or neighbouring sections as one stage, at any micro-batch size."""

    def __init__(self, subject: CalibrationSubject, sections: range, clock: ComputeClock) -> None:
        model_map, device = subject.model_map, subject.device
        self._stage: Stage = build_stage(
            subject.model, model_map, sections.start, sections.stop, device=device, values=subject.values
        )
        self._device = device
        self.random = RandomStreams(device, model_map.draws if model_map.random_by_example else None)
        self._last: tuple[Mapping[str, Any], Sequence[Tensor]] = ({}, ())
        self.clock = clock
        self.precision = subject.precision

    def make_received(self, micro_batch: int) -> list[Tensor]:
        """Tensors like those that the sections before would send."""
        return [_make_tensor(boundary, micro_batch, self._device) for boundary in self._stage.receives]

    def move_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs on the device."""
        return _move_inputs(inputs, self._device)

    def forward(self, inputs: dict[str, Any], received: list[Tensor]) -> tuple[list[Tensor], float]:
        """Runs as a stage that keeps its activations does; returns (outputs with a gradient, microseconds)."""
        for tensor in received:
            tensor.grad = None
        self._last = (inputs, received)
        started_us = self.clock.now_us()
        with torch.enable_grad(), self.precision.forward_context(), self.random.measured_draws(batch_size_of(inputs)):
            result = self._stage.forward(inputs, received)
        forward_us = self.clock.now_us() - started_us
        outputs = [result] if isinstance(result, Tensor) else result
        if not self._stage.is_last:
            outputs = [t for t, boundary in zip(outputs, self._stage.sends, strict=True) if boundary.requires_grad]
        return [t for t in outputs if t.requires_grad], forward_us

    def backward(self, outputs: list[Tensor]) -> float:
        """Runs backward from the outputs of the last `forward`; returns microseconds.

        `outputs` is empty afterwards, because freeing it is part of a stage's backward. Gradients add up until
        `drop_gradients`.
        """
        started_us = self.clock.now_us()
        if outputs:
            drawing = self.random.measured_draws(batch_size_of(self._last[0]))
            with self._stage.running_again(*self._last), drawing:
                torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
            outputs.clear()
        return self.clock.now_us() - started_us

    def drop_gradients(self) -> None:
        for parameter in self._stage.parameters.values():
            parameter.grad = None

    def measure_activation_bytes(self, inputs: dict[str, Any], received: list[Tensor]) -> int:
        """What each forward adds to memory until its backward, counted in one pass: what the section saves, and what it
        sends. What it receives is `input_bytes`, or has been sent by the section before it in the same stage."""
        stage = self._stage
        anyway = [*stage.parameters.values(), *stage.buffers.values(), *_tensors(inputs), *received]
        if self.precision.is_mixed:
            # Autocast casts the parameters once for all micro-batches, so the casts of this forward are in memory for
            # the next one. Everything else that this forward saves is new memory in the next.
            first = SavedTensors(anyway)
            with first.record_saves():
                self.backward(self.forward(inputs, received)[0])
            anyway += first.tensors
        kept = SavedTensors(anyway)
        with kept.record_saves():
            outputs, _ = self.forward(inputs, received)
            kept.add(outputs)
            self.backward(outputs)
        return kept.bytes

    def measure_working_bytes(self, inputs: dict[str, Any], received: list[Tensor], activation_bytes: int) -> int:
        """What its passes take on an accelerator beyond its state, what it receives and what it saves; 0 elsewhere."""
        if not is_accelerator(self._device):
            return 0
        self.backward(self.forward(inputs, received)[0])  # from then on gradients and casts are there
        for tensor in received:
            tensor.grad = None
        before = reset_peak_memory(self._device)
        self.backward(self.forward(inputs, received)[0])
        return max(peak_memory_bytes(self._device) - before - activation_bytes, 1)

    def input_bytes(self, micro_batch: int, inputs: Mapping[str, Any]) -> int:
        """Of the tensors that the sections before would send, and of the model's inputs that the section reads."""
        received = sum(boundary.bytes_for(micro_batch) for boundary in self._stage.receives)
        return received + sum(tensor.nbytes for tensor in _tensors(self._stage.list_read_inputs(inputs)))

    def make_measurement(
        self, micro_batch: int, forward_us: float, backward_us: float, memory: _PassMemory
    ) -> Measurement:
        """A recompute counts as a forward, which is the same work."""
        return Measurement(
            micro_batch=micro_batch,
            forward_us=forward_us,
            backward_us=backward_us,
            recompute_us=forward_us,
            output_bytes=sum(boundary.bytes_for(micro_batch) for boundary in self._stage.sends),
            input_bytes=memory.input_bytes,
            activation_bytes=memory.activation_bytes,
            working_bytes=memory.working_bytes,
        )


class _PassMemory(NamedTuple):
    input_bytes: int
    activation_bytes: int
    working_bytes: int


def measure_in_turn(
    meters: Sequence[SectionMeter], inputs: Mapping[str, Any], micro_batch: int, slice_s: float
) -> list[Measurement]:
    """Medians over repetitions that take about `slice_s` for each section. Raises torch.OutOfMemoryError.

    The sections, in the model's order, run as in training: all forwards, then all backwards from the last to the first.
    So each section finds the caches as the others left them. If a small section ran again and again by itself, it would
    find its own parameters, gradients and activations in the caches. `inputs` are m examples.
    """
    on_device = meters[0].move_inputs(inputs)
    found = []
    with _gradients_dropped(meters):
        memory = [_measure_memory(meter, on_device, micro_batch) for meter in meters]
        for chain in _chains([one.input_bytes + one.activation_bytes for one in memory]):
            passes = _SectionPasses([meters[i] for i in chain], on_device, micro_batch)
            rounds = [passes.run_once() for _ in _repetitions(slice_s * len(chain))]
            for i, times in zip(chain, zip(*rounds, strict=True), strict=True):
                forward_us, backward_us = (statistics.median(us) for us in zip(*times, strict=True))
                found.append(meters[i].make_measurement(micro_batch, forward_us, backward_us, memory[i]))
    return found


def _measure_memory(meter: SectionMeter, inputs: dict[str, Any], micro_batch: int) -> _PassMemory:
    activation_bytes = meter.measure_activation_bytes(inputs, meter.make_received(micro_batch))
    working_bytes = meter.measure_working_bytes(inputs, meter.make_received(micro_batch), activation_bytes)
    return _PassMemory(meter.input_bytes(micro_batch, inputs), activation_bytes, working_bytes)


def _chains(held_bytes: Sequence[int]) -> list[range]:
    """Neighbours that run in turn: as few as hold more than any cache, because memory on the device is scarce."""
    chains, start, held = [], 0, 0
    for index, each in enumerate(held_bytes):
        held += each
        if held >= _NO_CACHE_BYTES or index == len(held_bytes) - 1:
            chains.append(range(start, index + 1))
            start, held = index + 1, 0
    return chains


@contextmanager
def _gradients_dropped(meters: Sequence[SectionMeter]) -> Iterator[None]:
    """Around all measurements between two changes of the parameters."""
    try:
        with meters[0].precision.pass_context():
            yield
    finally:
        for meter in meters:
            meter.drop_gradients()


class _SectionPasses:
    """Micro-batches of one size, each through the same sections."""

    def __init__(self, meters: Sequence[SectionMeter], inputs: dict[str, Any], micro_batch: int) -> None:
        self._meters = meters
        self._inputs = inputs
        self._received = [meter.make_received(micro_batch) for meter in meters]

    def run_once(self) -> list[tuple[float, float]]:
        """Returns (forward, backward) of each section, in microseconds."""
        with self._meters[0].clock.watch_sharing():
            forwards = [
                meter.forward(self._inputs, received)
                for meter, received in zip(self._meters, self._received, strict=True)
            ]
            backwards_us = [
                meter.backward(outputs)
                for meter, (outputs, _) in zip(reversed(self._meters), reversed(forwards), strict=True)
            ]
        return [(us, back_us) for (_, us), back_us in zip(forwards, reversed(backwards_us), strict=True)]


def _repetitions(slice_s: float) -> Iterator[int]:
    """Counts from 0 until about `slice_s` is over: 3 to 30 repetitions, or fewer if each is very slow."""
    started_s = time.perf_counter()
    for number in range(_MOST):
        taken_s = time.perf_counter() - started_s
        if number >= _FEWEST and taken_s >= slice_s:
            return
        if number > 0 and taken_s > 10 * slice_s:
            return  # a slow section has little noise
        yield number


def time_stage_overhead(
    whole: SectionMeter, parts: Sequence[SectionMeter], inputs: Mapping[str, Any], *, micro_batch: int, slice_s: float
) -> tuple[float, float]:
    """What each (forward, backward) of a stage takes on top of its sections, in microseconds.

    `whole` is a stage of all the sections in `parts`, which are at least two. Run one by one, each part takes the
    overhead once. The result is the median over rounds, which take about `slice_s` together.
    Raises torch.OutOfMemoryError.
    """
    on_device = whole.move_inputs(inputs)
    rounds: list[tuple[float, float]] = []
    with _gradients_dropped([whole, *parts]):
        at_once, in_turn = (_SectionPasses(meters, on_device, micro_batch) for meters in ([whole], parts))
        for _ in _repetitions(slice_s):
            [of_whole] = at_once.run_once()
            of_parts = zip(*in_turn.run_once(), strict=True)
            forward_us, backward_us = (sum(us) - us_whole for us, us_whole in zip(of_parts, of_whole, strict=True))
            rounds.append((forward_us, backward_us))
    forward_us, backward_us = (statistics.median(times) / (len(parts) - 1) for times in zip(*rounds, strict=True))
    return max(0.0, forward_us), max(0.0, backward_us)


def _make_tensor(boundary: Boundary, micro_batch: int, device: torch.device) -> Tensor:
    """A tensor like those that cross here. Integers are 0 and masks True, which indices and attention accept."""
    shape = boundary.shape_for(micro_batch)
    if boundary.dtype.is_floating_point or boundary.dtype.is_complex:
        generator = torch.Generator(device).manual_seed(0)  # the script's own random stream stays as it is
        tensor = torch.randn(shape, dtype=boundary.dtype, device=device, generator=generator)
        return tensor.requires_grad_(boundary.requires_grad)
    if boundary.dtype is torch.bool:
        return torch.ones(shape, dtype=boundary.dtype, device=device)
    return torch.zeros(shape, dtype=boundary.dtype, device=device)


def _move_inputs(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    moved: dict[str, Any] = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(inputs))
    return moved


def _tensors(inputs: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(dict(inputs))[0] if isinstance(leaf, Tensor)]
