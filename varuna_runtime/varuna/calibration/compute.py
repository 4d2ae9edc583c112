"""Time and memory of one section: a stage of that section alone, run on boundary tensors made up for it.

A stage runs the whole of the user's forward, with ghosts in the place of what other stages run. So a section alone
takes longer than as one of several: by what each run of a stage takes, which is measured by itself
(`time_stage_overhead`).

On a CPU the clock is the thread's own. Ranks that share cores wait for them at random, for many times what a section
takes, so that elapsed times of single sections say little; what sharing usually costs over longer times
(`Clock.sharing`) is put on top of every section alike.

Letter: m examples in a micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from varuna.partition import ModelMap, Stage, Values, build_stage
from varuna.partition.batch import batch_size_of
from varuna.partition.shapes import Boundary
from varuna.pipeline.randomness import RandomStreams
from varuna.precision import Precision
from varuna_planner.profile import Measurement

__all__ = ["Clock", "SectionMeter", "measure_in_turn", "time_stage_overhead", "worth_doubling"]

_log = structlog.get_logger(__name__)

_FEWEST, _MOST = 3, 30
"""Repetitions of one measurement, between which the time decides."""

_SHARED_S = 0.05
"""Over which a core's sharing is told: several rounds of the scheduler."""

_NO_CACHE_BYTES = 512 * 2**20
"""More than the caches of CPUs and GPUs hold (the largest have some 256 MB for one die's cores)."""

_GAIN = 0.05
"""A larger micro-batch is worth it while it saves this share of the time per example."""


def worth_doubling(per_example_us: Sequence[float]) -> bool:
    """Whether to measure twice the micro-batch, after the times per example of all sizes so far, ascending.

    Not when the last two sizes both failed to beat the best before them by 5 %: one alone may be noise.
    """
    if len(per_example_us) < 3:
        return True
    best = min(per_example_us[:-2])
    return min(per_example_us[-2:]) < (1 - _GAIN) * best


class Clock:
    """Tells what work on `device` takes, without what others do on the same cores."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elapsed_s = 0.0
        self._own_s = 0.0
        self._ratios: list[float] = []

    def now_us(self) -> float:
        """Once all work submitted before is done."""
        if self._device.type == "cpu":
            return time.thread_time() * 1e6
        torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1e6

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note how much of the time in here was the thread's own."""
        elapsed_s, own_s = time.perf_counter(), time.thread_time()
        yield
        self.note(time.perf_counter() - elapsed_s, time.thread_time() - own_s)

    def note(self, elapsed_s: float, own_s: float) -> None:
        """Adds what was watched. Short times are put together: a thread has its core for milliseconds on end."""
        self._elapsed_s += elapsed_s
        self._own_s += own_s
        if self._elapsed_s >= _SHARED_S and self._own_s > 0:
            self._ratios.append(self._elapsed_s / self._own_s)
            self._elapsed_s = self._own_s = 0.0

    @property
    def sharing(self) -> float:
        """How many times as long work takes by the wall clock as by `now_us`: 1 for a device or a core of one's own.

        The median over times of a few rounds of the scheduler: what interrupted the calibration now and then is none of
        what training shares the cores with.
        """
        if self._device.type != "cpu":
            return 1.0
        if not self._ratios:
            return max(1.0, self._elapsed_s / self._own_s) if self._own_s > 0 else 1.0
        return max(1.0, statistics.median(self._ratios))


class SectionMeter:
    """Runs a section of a model, or a run of them as one, on `device` and at any micro-batch sizes."""

    def __init__(
        self,
        model: nn.Module,
        model_map: ModelMap,
        sections: range,
        device: torch.device,
        clock: Clock,
        precision: Precision,
        values: Values | None = None,
    ) -> None:
        self._stage: Stage = build_stage(model, model_map, sections.start, sections.stop, device, values)
        self._device = device
        self.random = RandomStreams(device, model_map.draws if model_map.random_by_example else None)
        self._last: tuple[Mapping[str, Any], Sequence[Tensor]] = ({}, ())
        self.clock = clock
        self.precision = precision

    def received(self, micro_batch: int) -> list[Tensor]:
        """What the sections before would send, made up."""
        return [_made_up(boundary, micro_batch, self._device) for boundary in self._stage.receives]

    def moved(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs on the device."""
        return _moved(inputs, self._device)

    def forward(self, inputs: dict[str, Any], received: list[Tensor]) -> tuple[list[Tensor], float]:
        """(what it gives, microseconds): as a stage that keeps its activations runs it, with autograd on."""
        for tensor in received:
            tensor.grad = None
        self._last = (inputs, received)
        started_us = self.clock.now_us()
        with torch.enable_grad(), self.precision.forward(), self.random.drawing(batch_size_of(inputs)):
            result = self._stage.forward(inputs, received)
        forward_us = self.clock.now_us() - started_us
        return [t for t in ([result] if isinstance(result, Tensor) else result) if t.requires_grad], forward_us

    def backward(self, outputs: list[Tensor]) -> float:
        """Microseconds, of what the last `forward` gave, which is empty afterwards: freeing it is part of a stage's
        backward.

        Gradients add up until `forget_gradients`.
        """
        started_us = self.clock.now_us()
        if outputs:
            drawing = self.random.drawing(batch_size_of(self._last[0]))
            with self._stage.running_again(*self._last), drawing:
                torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
            outputs.clear()
        return self.clock.now_us() - started_us

    def forget_gradients(self) -> None:
        for parameter in self._stage.parameters.values():
            parameter.grad = None

    def activation_bytes(self, inputs: dict[str, Any], received: list[Tensor]) -> int:
        """What the section keeps for its backward, counted in a pass through it."""
        stage = self._stage
        anyway = [*stage.parameters.values(), *stage.buffers.values(), *_tensors(inputs)]
        if self.precision.mixed:
            # Autocast's casts of the parameters are there once, for all micro-batches: what this forward makes and
            # the next one uses again. The rest of this one's is new memory in the next.
            first = _KeptBytes(anyway)
            with first.counting():
                self.backward(self.forward(inputs, received)[0])
            anyway += first.tensors
        kept = _KeptBytes(anyway)
        with kept.counting():
            self.backward(self.forward(inputs, received)[0])
        return kept.bytes

    def input_bytes(self, micro_batch: int) -> int:
        """Of what `received` gives."""
        return sum(boundary.bytes_for(micro_batch) for boundary in self._stage.receives)

    def measurement(
        self, micro_batch: int, forward_us: float, backward_us: float, activation_bytes: int
    ) -> Measurement:
        """A recompute is the same work as a forward."""
        return Measurement(
            micro_batch=micro_batch,
            forward_us=forward_us,
            backward_us=backward_us,
            recompute_us=forward_us,
            output_bytes=sum(boundary.bytes_for(micro_batch) for boundary in self._stage.sends),
            input_bytes=self.input_bytes(micro_batch),
            activation_bytes=activation_bytes,
        )


def measure_in_turn(
    meters: Sequence[SectionMeter], inputs: Mapping[str, Any], micro_batch: int, slice_s: float
) -> list[Measurement]:
    """Medians over repetitions that take about `slice_s` for each section. Raises torch.OutOfMemoryError.

    The sections, in the model's order, run as in training: all forwards, then all backwards from the last to the first.
    So each finds the caches as the others have left them. Run again and again by itself, a small section would find its
    own parameters, gradients and activations there. `inputs` are m examples.
    """
    on_device = meters[0].moved(inputs)
    found = []
    with _gradients_forgotten(meters):
        activation_bytes = [meter.activation_bytes(on_device, meter.received(micro_batch)) for meter in meters]
        held_bytes = [
            meter.input_bytes(micro_batch) + kept for meter, kept in zip(meters, activation_bytes, strict=True)
        ]
        for chain in _chains(held_bytes):
            passes = _Passes([meters[i] for i in chain], on_device, micro_batch)
            rounds = [passes.once() for _ in _repetitions(slice_s * len(chain))]
            for i, times in zip(chain, zip(*rounds, strict=True), strict=True):
                forward_us, backward_us = (statistics.median(us) for us in zip(*times, strict=True))
                found.append(meters[i].measurement(micro_batch, forward_us, backward_us, activation_bytes[i]))
    return found


def _chains(held_bytes: Sequence[int]) -> list[range]:
    """Neighbours that run in turn: as few as hold more than any cache, for the device's memory has other uses."""
    chains, start, held = [], 0, 0
    for index, each in enumerate(held_bytes):
        held += each
        if held >= _NO_CACHE_BYTES or index == len(held_bytes) - 1:
            chains.append(range(start, index + 1))
            start, held = index + 1, 0
    return chains


@contextmanager
def _gradients_forgotten(meters: Sequence[SectionMeter]) -> Iterator[None]:
    """For around all that is measured between two changes of the parameters."""
    try:
        with meters[0].precision.whole_pass():
            yield
    finally:
        for meter in meters:
            meter.forget_gradients()


class _Passes:
    """Micro-batches of one size, each through all of some sections."""

    def __init__(self, meters: Sequence[SectionMeter], inputs: dict[str, Any], micro_batch: int) -> None:
        self._meters = meters
        self._inputs = inputs
        self._received = [meter.received(micro_batch) for meter in meters]

    def once(self) -> list[tuple[float, float]]:
        """(forward, backward) of each section, in microseconds."""
        with self._meters[0].clock.watching():
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
    """Numbers from 0, until about `slice_s` is over; at least 3 and at most 30, but fewer of what is very slow."""
    started_s = time.perf_counter()
    for number in range(_MOST):
        taken_s = time.perf_counter() - started_s
        if number >= _FEWEST and taken_s >= slice_s:
            return
        if number > 0 and taken_s > 10 * slice_s:
            return  # what is this slow has little noise
        yield number


def time_stage_overhead(
    whole: SectionMeter, parts: Sequence[SectionMeter], inputs: Mapping[str, Any], micro_batch: int, slice_s: float
) -> tuple[float, float]:
    """What each (forward, backward) of a stage takes in microseconds, however few sections it has.

    `whole` is a stage of all the sections that are `parts`, at least two: run one by one, they take it once each. The
    median over rounds, which take about `slice_s` together. Raises torch.OutOfMemoryError.
    """
    on_device = whole.moved(inputs)
    rounds: list[tuple[float, float]] = []
    with _gradients_forgotten([whole, *parts]):
        at_once, in_turn = (_Passes(meters, on_device, micro_batch) for meters in ([whole], parts))
        for _ in _repetitions(slice_s):
            [of_whole] = at_once.once()
            of_parts = zip(*in_turn.once(), strict=True)
            forward_us, backward_us = (sum(us) - us_whole for us, us_whole in zip(of_parts, of_whole, strict=True))
            rounds.append((forward_us, backward_us))
    forward_us, backward_us = (statistics.median(times) / (len(parts) - 1) for times in zip(*rounds, strict=True))
    return max(0.0, forward_us), max(0.0, backward_us)


class _KeptBytes:
    """Counts what autograd keeps for backward, without tensors that are there anyway."""

    def __init__(self, anyway: Sequence[Tensor]) -> None:
        self._anyway = {tensor.untyped_storage().data_ptr() for tensor in anyway}
        self._kept: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    @property
    def tensors(self) -> list[Tensor]:
        """They are kept alive, so that no storage address is used twice."""
        return list(self._kept.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # the tensor itself would be a reference cycle where an operation keeps its output
        address = tensor.untyped_storage().data_ptr()
        if address not in self._anyway:
            self._kept[address] = kept
        return kept


def _made_up(boundary: Boundary, micro_batch: int, device: torch.device) -> Tensor:
    """A tensor like one that crosses here. Whole numbers are 0 and masks True: valid as indices and for attention."""
    shape = boundary.shape_for(micro_batch)
    if boundary.dtype.is_floating_point or boundary.dtype.is_complex:
        generator = torch.Generator(device).manual_seed(0)  # the script's own random stream stays where it is
        tensor = torch.randn(shape, dtype=boundary.dtype, device=device, generator=generator)
        return tensor.requires_grad_(boundary.requires_grad)
    if boundary.dtype is torch.bool:
        return torch.ones(shape, dtype=boundary.dtype, device=device)
    return torch.zeros(shape, dtype=boundary.dtype, device=device)


def _moved(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    moved: dict[str, Any] = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(inputs))
    return moved


def _tensors(inputs: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(dict(inputs))[0] if isinstance(leaf, Tensor)]
