"""Time and memory of one section: a stage of that section alone, run on boundary tensors made up for it.

A stage runs the whole of the user's forward, with ghosts in the place of what other stages run. So a section alone
takes longer than as one of several: by what each run of a stage takes, which is measured by itself
(`time_stage_overhead`).

On a CPU the clock is the thread's own. Ranks that share cores wait for them at random, for many times what a section
takes, so that elapsed times of single sections say little; what sharing costs over the whole calibration
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

from varuna.partition import ModelMap, Stage, build_stage
from varuna.partition.shapes import Boundary
from varuna.precision import Precision
from varuna_planner.profile import Measurement

__all__ = ["Clock", "SectionMeter", "time_stage_overhead", "worth_doubling"]

_log = structlog.get_logger(__name__)

_FEWEST, _MOST = 3, 30
"""Repetitions of one measurement, between which the time decides."""

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
        self.elapsed_s = 0.0
        self.own_s = 0.0

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
        self.elapsed_s += time.perf_counter() - elapsed_s
        self.own_s += time.thread_time() - own_s

    @property
    def sharing(self) -> float:
        """How many times as long work takes by the wall clock as by `now_us`: 1 for a device or a core of one's own."""
        if self._device.type != "cpu" or self.own_s == 0:
            return 1.0
        return max(1.0, self.elapsed_s / self.own_s)


class SectionMeter:
    """Measures a section of a model, or a run of them as one, on `device` and at any micro-batch sizes."""

    def __init__(
        self,
        model: nn.Module,
        model_map: ModelMap,
        sections: range,
        device: torch.device,
        clock: Clock,
        precision: Precision,
    ) -> None:
        self._stage: Stage = build_stage(model, model_map, sections.start, sections.stop, device)
        self._device = device
        self._precision = precision
        self._clock = clock

    def measure(self, inputs: Mapping[str, Any], micro_batch: int, slice_s: float) -> Measurement:
        """Medians over repetitions that take about `slice_s`. Raises torch.OutOfMemoryError.

        `inputs` are m examples. Forward is timed as a stage that keeps its activations runs it, with autograd on; a
        recompute is the same work.
        """
        try:
            with self._clock.watching(), self._precision.whole_pass():
                return self._measure(_moved(inputs, self._device), micro_batch, slice_s)
        finally:
            self.forget_gradients()

    def once_us(self, inputs: Mapping[str, Any], micro_batch: int) -> tuple[float, float]:
        """(forward, backward) of one run. Gradients add up until `forget_gradients`."""
        received = [_made_up(boundary, micro_batch, self._device) for boundary in self._stage.receives]
        with self._clock.watching(), self._precision.whole_pass():
            return self._once(_moved(inputs, self._device), received)

    def forget_gradients(self) -> None:
        for parameter in self._stage.parameters.values():
            parameter.grad = None

    def _measure(self, inputs: dict[str, Any], micro_batch: int, slice_s: float) -> Measurement:
        stage = self._stage
        received = [_made_up(boundary, micro_batch, self._device) for boundary in stage.receives]
        started_s = time.perf_counter()
        activation_bytes = self._activation_bytes(inputs, received)
        forwards_us: list[float] = []
        backwards_us: list[float] = []
        while len(forwards_us) < _MOST and (len(forwards_us) < _FEWEST or time.perf_counter() - started_s < slice_s):
            forward_us, backward_us = self._once(inputs, received)
            forwards_us.append(forward_us)
            backwards_us.append(backward_us)
            if time.perf_counter() - started_s > 10 * slice_s:
                break  # a section this slow has little noise
        return Measurement(
            micro_batch=micro_batch,
            forward_us=statistics.median(forwards_us),
            backward_us=statistics.median(backwards_us),
            recompute_us=statistics.median(forwards_us),
            output_bytes=sum(boundary.bytes_for(micro_batch) for boundary in stage.sends),
            input_bytes=sum(boundary.bytes_for(micro_batch) for boundary in stage.receives),
            activation_bytes=activation_bytes,
        )

    def _activation_bytes(self, inputs: dict[str, Any], received: list[Tensor]) -> int:
        stage = self._stage
        anyway = [*stage.parameters.values(), *stage.buffers.values(), *_tensors(inputs)]
        if self._precision.mixed:
            # Autocast's casts of the parameters are there once, for all micro-batches: what this forward makes and
            # the next one uses again. The rest of this one's is new memory in the next.
            first = _KeptBytes(anyway)
            with first.counting():
                self._once(inputs, received)
            anyway += first.tensors
        kept = _KeptBytes(anyway)
        with kept.counting():
            self._once(inputs, received)
        return kept.bytes

    def _once(self, inputs: dict[str, Any], received: list[Tensor]) -> tuple[float, float]:
        """(forward, backward) in microseconds."""
        for tensor in received:
            tensor.grad = None
        started_us = self._clock.now_us()
        with torch.enable_grad(), self._precision.forward():
            result = self._stage.forward(inputs, received)
        forward_us = self._clock.now_us() - started_us
        outputs = [t for t in ([result] if isinstance(result, Tensor) else result) if t.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in outputs]
        started_us = self._clock.now_us()
        if outputs:
            torch.autograd.backward(outputs, gradients)
        return forward_us, self._clock.now_us() - started_us


def time_stage_overhead(
    whole: SectionMeter, parts: Sequence[SectionMeter], inputs: Mapping[str, Any], micro_batch: int, slice_s: float
) -> tuple[float, float]:
    """What each (forward, backward) of a stage takes in microseconds, however few sections it has.

    `whole` is a stage of all the sections that are `parts`, at least two: run one by one, they take it once each. The
    median over rounds, which take about `slice_s` together. Raises torch.OutOfMemoryError.
    """
    started_s = time.perf_counter()
    rounds: list[tuple[float, float]] = []
    try:
        while len(rounds) < _MOST and (len(rounds) < _FEWEST or time.perf_counter() - started_s < slice_s):
            once = whole.once_us(inputs, micro_batch)
            each = [part.once_us(inputs, micro_batch) for part in parts]
            forward_us, backward_us = (
                sum(times) - of_whole for times, of_whole in zip(zip(*each, strict=True), once, strict=True)
            )
            rounds.append((forward_us, backward_us))
            if time.perf_counter() - started_s > 10 * slice_s:
                break  # beside sections this slow it does not count
    finally:
        for meter in (whole, *parts):
            meter.forget_gradients()
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
