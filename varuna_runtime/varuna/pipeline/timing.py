"""How long the ops of a pass take, and how long the stage waits between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from varuna._gloo import record_event
from varuna.pipeline.timeline import OPS, Timeline

__all__ = ["PassTimer", "Usual"]


@dataclass(frozen=True)
class _Op:
    name: str
    micro_batch: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Usual:
    """Medians over a pass, in microseconds; 0 for an op that the stage does not do."""

    forward_us: int = 0
    recompute_us: int = 0
    backward_us: int = 0


class PassTimer:
    """Times the ops of a pass: by the clock on a CPU, by events on a CUDA device (where launching is not running)."""

    def __init__(self, device: torch.device) -> None:
        self._began_ns = time.perf_counter_ns()
        self._ops: list[_Op] = []
        self._events: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._first = record_event(timed=True) if device.type == "cuda" else None

    @contextmanager
    def measure(self, name: str, micro_batch: int) -> Iterator[None]:
        """Times one op."""
        if self._first is not None:
            begin = record_event(timed=True)
            yield
            self._events.append((name, micro_batch, begin, record_event(timed=True)))
        else:
            begin_ns = time.perf_counter_ns()
            yield
            self._ops.append(_Op(name, micro_batch, begin_ns, time.perf_counter_ns()))

    def finish(self, timeline: Timeline) -> tuple[Usual, int]:
        """(the usual times, µs in which no op ran). Waits for the device. The timeline gets every op."""
        if self._first is not None:
            torch.cuda.synchronize()
            self._ops = [
                _Op(name, micro_batch, self._on_host_clock(begin), self._on_host_clock(end))
                for name, micro_batch, begin, end in self._events
            ]
        elapsed_ns = time.perf_counter_ns() - self._began_ns
        durations: dict[str, list[int]] = {}
        for op in self._ops:
            durations.setdefault(op.name, []).append(op.end_ns - op.begin_ns)
            timeline.add(OPS, f"{op.name}{op.micro_batch}", op.begin_ns, op.end_ns, micro_batch=op.micro_batch)
        usual_us = {name: round(median(each) / 1e3) for name, each in durations.items()}
        idle_ns = elapsed_ns - sum(map(sum, durations.values()))
        usual = Usual(
            forward_us=usual_us.get("F", 0), recompute_us=usual_us.get("R", 0), backward_us=usual_us.get("B", 0)
        )
        return usual, max(0, round(idle_ns / 1e3))

    def _on_host_clock(self, event: torch.cuda.Event) -> int:
        # The device had nothing to do at the beginning of the pass, so its first event was then.
        assert self._first is not None
        after_ms: float = self._first.elapsed_time(event)
        return self._began_ns + round(after_ms * 1e6)
