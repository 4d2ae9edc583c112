"""The earliest time at which a stage's next gradient should arrive, by which the `varuna` policy plans recomputes.

The forecast uses compute times only, so it is optimistic where links are slow. It gives no time until the next stage
should have begun the backward: a stage that knows of a gradient long before recomputes while it waits for an
activation, and after the recompute it starts no forward.
"""

from __future__ import annotations

import math

from varuna.pipeline.pass_timer import OpTimes

__all__ = ["GradientForecast"]

UNKNOWN = -1.0


class GradientForecast:
    """The forecast of one stage, on `time.perf_counter_ns`. It assumes that later stages are as fast as this one."""

    def __init__(self, stages_after: int) -> None:
        self._stages_after = stages_after
        self._op_times = OpTimes()
        self._begun = False
        self._last_event_ns = 0
        self._arrived = 0

    def begin_pass(self, op_times: OpTimes) -> None:
        """Starts a pass. `op_times`: this stage's times in the pass before."""
        self._op_times = op_times
        self._begun = False
        self._arrived = 0

    def record_first_forward(self, now_ns: int) -> None:
        """Records the end of the first forward of the pass."""
        self._begun = True
        self._last_event_ns = now_ns

    def record_arrivals(self, count: int, last_ns: int) -> None:
        """Records that `count` gradients of this pass have arrived, the newest at `last_ns`."""
        if count > self._arrived:
            self._arrived = count
            self._last_event_ns = last_ns

    def due_us(self, now_ns: int) -> float:
        """Microseconds until the next gradient is due; 0 when it is overdue, -1 when unknown.

        It is unknown until the next stage should have begun that backward, because `choose` prepares for a gradient
        that is due, and a stage that has recomputed waits.
        """
        left_us = self._left_us(now_ns)
        return UNKNOWN if left_us is None or left_us > self._op_times.backward_us else max(0.0, left_us)

    def changes_in_s(self, now_ns: int) -> float:
        """Seconds until `due_us` changes so much that a choice may change, if nothing arrives."""
        left_us = self._left_us(now_ns)
        if left_us is None or left_us <= 0:
            return math.inf
        return (left_us - self._op_times.backward_us if left_us > self._op_times.backward_us else left_us) / 1e6

    def _left_us(self, now_ns: int) -> float | None:
        op_times = self._op_times
        if not op_times.backward_us or not self._begun:
            return None
        if self._arrived:
            after_us = op_times.backward_us
        else:
            after_us = self._stages_after * (op_times.forward_us + op_times.backward_us)
        return after_us - (now_ns - self._last_event_ns) / 1e3
