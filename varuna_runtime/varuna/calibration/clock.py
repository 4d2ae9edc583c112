"""The time that work takes on a device.

On a CPU the clock is the thread's own. Ranks that share cores wait for each other at random, for many times what a
section takes, so the elapsed time of a single section says little. What sharing costs over longer times
(`ComputeClock.sharing`) is added to every section alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from varuna.devices.accelerator import is_accelerator, wait_for_device

__all__ = ["ComputeClock"]

_SHARING_PERIOD_S = 0.05
"""How long sharing is watched for one ratio: several rounds of the scheduler."""


class ComputeClock:
    """Measures what work on `device` takes, without what other processes do on the same cores."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elapsed_s = 0.0
        self._own_s = 0.0
        self._ratios: list[float] = []

    def now_us(self) -> float:
        """The time once all submitted work is done."""
        if not is_accelerator(self._device):
            return time.thread_time() * 1e6
        wait_for_device(self._device)
        return time.perf_counter() * 1e6

    @contextmanager
    def watch_sharing(self) -> Iterator[None]:
        """Records how much of the time in the block is the thread's own."""
        elapsed_s, own_s = time.perf_counter(), time.thread_time()
        yield
        self.record_sharing(time.perf_counter() - elapsed_s, time.thread_time() - own_s)

    def record_sharing(self, elapsed_s: float, own_s: float) -> None:
        """Adds a watched time. Short times are joined, because a thread has its core for milliseconds on end."""
        self._elapsed_s += elapsed_s
        self._own_s += own_s
        if self._elapsed_s >= _SHARING_PERIOD_S and self._own_s > 0:
            self._ratios.append(self._elapsed_s / self._own_s)
            self._elapsed_s = self._own_s = 0.0

    @property
    def sharing(self) -> float:
        """The ratio of elapsed time to `now_us`: 1 if this process has the device or core for itself.

        It is the median over periods of a few rounds of the scheduler, because what interrupts a calibration now and
        then does not share the cores with the training.
        """
        if is_accelerator(self._device):
            return 1.0
        if not self._ratios:
            return max(1.0, self._elapsed_s / self._own_s) if self._own_s > 0 else 1.0
        return max(1.0, statistics.median(self._ratios))
