"""How fast copies are sent: only as fast as training does not feel it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["LEAST_SHARE", "CopyPace", "IdleProcessors"]

LEAST_SHARE = 0.01
"""Of the machine's processors: what copies take even where none is idle."""
_IDLE_SHARE = 0.2
"""Of the idle processors. They are idle on average, not each time that a chunk is sent."""
_OWN_PART = 0.5
"""The other half is for copies that come in."""
_LONGEST_PAUSE_S = 1.0
"""Between two chunks."""
_LONGEST_YIELD_S = 0.05
"""How long a chunk waits for messages of the pipeline: one that never ends must not end the copies."""
_YIELD_CHECK_S = 0.0005


class IdleProcessors:
    """How many processors of this machine are idle, by the kernel's counters."""

    _UPDATE_S = 0.25

    def __init__(self, path: Path = Path("/proc/stat"), clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._seen_s = clock()
        self._seen = self._read_counters()
        self._idle = 0.0

    def count(self) -> float:
        """On average over the last fraction of a second; 0 where that is not known."""
        now_s = self._clock()
        if now_s - self._seen_s >= self._UPDATE_S:
            before, self._seen = self._seen, self._read_counters()
            self._seen_s = now_s
            if (total := self._seen[1] - before[1]) > 0:
                self._idle = (self._seen[0] - before[0]) / total * (os.cpu_count() or 1)
        return self._idle

    def _read_counters(self) -> tuple[int, int]:
        """Ticks of idling, and all ticks."""
        try:
            ticks = [int(word) for word in self._path.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        return (sum(ticks[3:5]), sum(ticks)) if len(ticks) >= 5 else (0, 0)


class CopyPace:
    """Waits between the chunks of a copy.

    A copy waits for messages of the pipeline that are on their way from here, so that these have the link. And it
    leaves the processors to training, where that uses them: the time that sending takes is a share of all time.
    """

    def __init__(
        self, is_pipeline_sending: Callable[[], bool], stopped: threading.Event, *, least_share: float = LEAST_SHARE
    ) -> None:
        """`least_share`: of the machine's processors, also where none is idle."""
        self._is_pipeline_sending = is_pipeline_sending
        self._least_share = least_share
        self._stopped = stopped
        self._processors = IdleProcessors()
        self._chunk_began_s = time.thread_time()

    def begin_chunk(self) -> None:
        deadline_s = time.monotonic() + _LONGEST_YIELD_S
        while self._is_pipeline_sending() and time.monotonic() < deadline_s:
            self._stopped.wait(_YIELD_CHECK_S)
        self._chunk_began_s = time.thread_time()

    def end_chunk(self) -> None:
        spent_s = time.thread_time() - self._chunk_began_s
        share = max(self._least_share * (os.cpu_count() or 1), _IDLE_SHARE * self._processors.count()) * _OWN_PART
        if share < 1.0:
            self._stopped.wait(min(spent_s / share - spent_s, _LONGEST_PAUSE_S))
