"""The durations of the ops of a pass, and of the waits between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from varuna.devices.accelerator import is_accelerator, record_event, wait_for_event
from varuna.diagnostics.timeline import OPS, Timeline

__all__ = ["OpTimes", "PassTimer"]


@dataclass(frozen=True)
class _TimedOp:
    name: str
    micro_batch: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """Medians over the largest micro-batches of a pass, in microseconds; 0 for an op that the stage does not do."""

    forward_us: int = 0
    recompute_us: int = 0
    backward_us: int = 0


class PassTimer:
    """Times the ops of a pass: with the clock on a CPU, with events on an accelerator, which runs ops later."""

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        """`sizes`: the examples in each micro-batch of the pass."""
        self._device, self._sizes = device, sizes
        self._began_ns = time.perf_counter_ns()
        self._ops: list[_TimedOp] = []
        self._events: list[tuple[str, int, torch.Event, torch.Event]] = []
        self._first = record_event(device, timed=True) if is_accelerator(device) else None

    @contextmanager
    def measure_op(self, name: str, micro_batch: int) -> Iterator[None]:
        """Times one op."""
        if self._first is not None:
            begin = record_event(self._device, timed=True)
            yield
            self._events.append((name, micro_batch, begin, record_event(self._device, timed=True)))
        else:
            begin_ns = time.perf_counter_ns()
            yield
            self._ops.append(_TimedOp(name, micro_batch, begin_ns, time.perf_counter_ns()))

    def wait_for_last_but_one(self) -> None:
        """Waits until the device has at most one op of the pass left to finish."""
        if len(self._events) > 1:
            wait_for_event(self._events[-2][3])

    def finish_pass(self, timeline: Timeline) -> tuple[OpTimes, int]:
        """(median times of the ops, µs in which no op ran). Waits for the ops. The timeline gets every op."""
        if self._events:
            self._ops = self._read_events()
        elapsed_ns = time.perf_counter_ns() - self._began_ns
        # The last micro-batch may be smaller. In a short pass its times would make the stage look faster than it is.
        largest = max((self._sizes[op.micro_batch] for op in self._ops), default=0)
        durations: dict[str, list[int]] = {}
        for op in self._ops:
            if self._sizes[op.micro_batch] == largest:
                durations.setdefault(op.name, []).append(op.end_ns - op.begin_ns)
            timeline.add_span(OPS, f"{op.name}{op.micro_batch}", op.begin_ns, op.end_ns, micro_batch=op.micro_batch)
        medians_us = {name: round(median(each) / 1e3) for name, each in durations.items()}
        idle_ns = elapsed_ns - sum(op.end_ns - op.begin_ns for op in self._ops)
        op_times = OpTimes(
            forward_us=medians_us.get("F", 0), recompute_us=medians_us.get("R", 0), backward_us=medians_us.get("B", 0)
        )
        return op_times, max(0, round(idle_ns / 1e3))

    def _read_events(self) -> list[_TimedOp]:
        """The ops on the host's clock. Waits for the last op's event, and for no other stream: one that sums gradients
        with a rank that is gone would never end.

        When the pass began, the device may still have been at work on the step before. So the clocks are compared at
        the end of the last op, if the host has waited for that.
        """
        assert self._first is not None
        last = self._events[-1][3]
        has_waited = not last.query()
        wait_for_event(last)
        first_ns = self._began_ns
        if has_waited:
            first_ns = max(first_ns, time.perf_counter_ns() - _elapsed_ns(self._first, last))
        return [
            _TimedOp(name, number, first_ns + _elapsed_ns(self._first, begin), first_ns + _elapsed_ns(self._first, end))
            for name, number, begin, end in self._events
        ]


def _elapsed_ns(first: torch.Event, second: torch.Event) -> int:
    after_ms: float = first.elapsed_time(second)
    return round(after_ms * 1e6)
