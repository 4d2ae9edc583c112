"""Who does not answer, while this rank waits for others.

A rank that waits cannot see why: the others may compute, or their machine may be gone without a word. So it asks those
to which it has a connection (`presence.py`): rank 0 asks all, and all others ask rank 0. A thread of its own answers in
each process, whatever the script does there. Nothing is asked while no wait is long, and no rank is asked again before
it has answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

__all__ = ["RollCall"]

_ASK_EVERY_S = 0.25
_QUIET_AFTER_S = 0.5
"""A rank that has not answered for this long is quiet. A busy machine may make a sound rank look so: nothing follows
from it unless the rank's agent is silent as well."""
_MOST_NAMED = 64
"""Quiet ranks that are reported: one is enough."""


class RollCall:
    """`begin` and `end` it with each long wait.

    Args:
        list_ranks: the ranks that can be asked now.
        ask_rank: asks one; `record_answer` is called when it answers.
        report: called with the quiet ranks when they change, within a wait.
    """

    def __init__(
        self,
        list_ranks: Callable[[], Collection[int]],
        ask_rank: Callable[[int], None],
        report: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._list_ranks = list_ranks
        self._ask_rank = ask_rank
        self._report = report
        self._unanswered_s: dict[int, float] = {}
        """By rank that was asked and has not answered: how long ago that was."""
        self._lock = threading.Lock()
        self._over = threading.Event()

    def begin(self) -> None:
        self._over = over = threading.Event()
        threading.Thread(target=self._ask_until, args=(over,), name="varuna-roll-call", daemon=True).start()

    def end(self) -> None:
        """Nothing is reported after this."""
        with self._lock:
            self._over.set()

    def record_answer(self, rank: int) -> None:
        with self._lock:
            self._unanswered_s.pop(rank, None)

    def _ask_until(self, over: threading.Event) -> None:
        with self._lock:
            self._unanswered_s = {}
        reported: tuple[int, ...] = ()
        while not over.is_set():
            self._ask_ranks()
            began_s = time.monotonic()
            if over.wait(_ASK_EVERY_S):
                return
            # If this process stood still, its peers' answers wait to be read.
            waited_s = min(time.monotonic() - began_s, 1.5 * _ASK_EVERY_S)
            with self._lock:
                for rank in self._unanswered_s:
                    self._unanswered_s[rank] += waited_s
                quiet = sorted(
                    rank for rank, unanswered_s in self._unanswered_s.items() if unanswered_s >= _QUIET_AFTER_S
                )
                if not over.is_set() and tuple(quiet[:_MOST_NAMED]) != reported:
                    reported = tuple(quiet[:_MOST_NAMED])
                    self._report(reported)

    def _ask_ranks(self) -> None:
        with self._lock:
            ranks = set(self._list_ranks())
            asked = ranks - self._unanswered_s.keys()
            self._unanswered_s = {rank: s for rank, s in self._unanswered_s.items() if rank in ranks}
            self._unanswered_s |= dict.fromkeys(asked, 0.0)
        for rank in sorted(asked):
            self._ask_rank(rank)
