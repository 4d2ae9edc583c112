"""When a stage's next gradient should arrive at the earliest: what the `varuna` policy plans its recomputes by.

A forecast from compute times alone, so it is optimistic where links are slow. What matters most is that it is silent
until the next stage should have begun the backward: a stage told of a gradient far ahead recomputes while it waits for
an activation, and having recomputed it starts no forward.
"""

from __future__ import annotations

import math

from varuna.pipeline.timing import Usual

__all__ = ["GradientForecast"]

UNKNOWN = -1.0


class GradientForecast:
    """For one stage; times are of `time.perf_counter_ns`. The stages after it are taken to be as fast as it is."""

    def __init__(self, stages_after: int) -> None:
        self._stages_after = stages_after
        self._usual = Usual()
        self._begun = False
        self._last_event_ns = 0
        self._arrived = 0

    def begin(self, usual: Usual) -> None:
        """A pass begins; `usual` are this stage's times in the one before it."""
        self._usual = usual
        self._begun = False
        self._arrived = 0

    def first_forward(self, now_ns: int) -> None:
        """The first forward of the pass has ended."""
        self._begun = True
        self._last_event_ns = now_ns

    def arrived(self, count: int, last_ns: int) -> None:
        """So many gradients of this pass are here, the newest since `last_ns`."""
        if count > self._arrived:
            self._arrived = count
            self._last_event_ns = last_ns

    def due_us(self, now_ns: int) -> float:
        """Microseconds until the next gradient is due; 0 when it is overdue, -1 when there is no telling.

        There is none before the next stage should have begun that backward: `choose` takes a gradient that is due for
        one to make ready for, and a stage that has recomputed waits.
        """
        left_us = self._left_us(now_ns)
        return UNKNOWN if left_us is None or left_us > self._usual.backward_us else max(0.0, left_us)

    def changes_in_s(self, now_ns: int) -> float:
        """Seconds until `due_us` says something that may change a choice, though nothing arrives."""
        left_us = self._left_us(now_ns)
        if left_us is None or left_us <= 0:
            return math.inf
        return (left_us - self._usual.backward_us if left_us > self._usual.backward_us else left_us) / 1e6

    def _left_us(self, now_ns: int) -> float | None:
        usual = self._usual
        if not usual.backward_us or not self._begun:
            return None
        if self._arrived:
            after_us = usual.backward_us
        else:
            after_us = self._stages_after * (usual.forward_us + usual.backward_us)
        return after_us - (now_ns - self._last_event_ns) / 1e3
