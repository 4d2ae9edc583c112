"""How long the ops of a pass take, and how long the stage waits between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from varuna._gloo import record_event

__all__ = ["PassTimer"]


class PassTimer:
    """Times named ops: by the clock on a CPU, by events on a CUDA device (where launching is not running)."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._began_ns = time.perf_counter_ns()
        self._host_us: dict[str, list[float]] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Times one op."""
        if self._on_cuda:
            begin = record_event(timed=True)
            yield
            self._events.setdefault(name, []).append((begin, record_event(timed=True)))
        else:
            begin_ns = time.perf_counter_ns()
            yield
            self._host_us.setdefault(name, []).append((time.perf_counter_ns() - begin_ns) / 1e3)

    def finish(self) -> tuple[dict[str, int], int]:
        """(median µs per op's name, µs in which no op ran). Waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
            for name, pairs in self._events.items():
                self._host_us[name] = [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
        elapsed_us = (time.perf_counter_ns() - self._began_ns) / 1e3
        busy_us = sum(map(sum, self._host_us.values()))
        medians = {name: round(median(times)) for name, times in self._host_us.items()}
        return medians, max(0, round(elapsed_us - busy_us))
