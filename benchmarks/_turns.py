"""Two sides of a benchmark that run in one process, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

__all__ = ["take_turns"]


def take_turns(sides: Sequence[Callable[[], object]], times: int, turn: int) -> list[tuple[float, float]]:
    """(seconds by the wall clock, of CPU time) of each side, run `times` times. Odd turns begin with the first."""
    took = {}
    for side in (0, 1) if turn % 2 else (1, 0):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(times):
            sides[side]()
        took[side] = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return [took[0], took[1]]
