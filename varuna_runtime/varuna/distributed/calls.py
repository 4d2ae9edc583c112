"""Whether all ranks make the same calls: a rank whose data ends earlier leaves the loop, and the others would wait.

Every call in which ranks wait for each other has a number, the same on all of them: step, evaluate, checkpoint and so
on, up to the end of the script. A rank announces every call but steps (`presence.py` carries that), so steps cost
nothing. A rank whose call of that number differs raises one line instead of waiting for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from varuna.distributed.departure import Departure, RanksDifferError

__all__ = ["CallChecker", "CallKind", "RankCall"]

_KEPT = 64
"""The newest own calls that are kept; ranks that wait for each other are never further apart."""


class CallKind(Enum):
    """What ranks do together. The value stands for it in messages."""

    STEP = b"s"
    EVALUATE = b"e"
    CHECKPOINT = b"c"
    LOAD = b"o"
    RESUME = b"r"
    FULL_STATE_DICT = b"f"
    END = b"z"


class RankCall(NamedTuple):
    number: int
    """From 1, over all operations."""
    operation: CallKind
    steps: int
    """Done before it."""

    def render_for(self, who: str) -> str:
        if self.operation is CallKind.END:
            return f"{who} has ended its script after step {self.steps}"
        if self.operation is CallKind.STEP:
            return f"{who} is in step {self.steps + 1}"
        name = {CallKind.LOAD: "load_checkpoint"}.get(self.operation, self.operation.name.lower())
        return f"{who} is in {name}() after step {self.steps}"


class CallChecker:
    """Compares this rank's calls with those that other ranks announce."""

    def __init__(self, rank: int, departure: Departure) -> None:
        self.announce: Callable[[RankCall], None] = lambda call: None
        """Announces a call to the other ranks."""
        self._rank = rank
        self._departure = departure
        self._lock = threading.Lock()
        self._own: deque[RankCall] = deque(maxlen=_KEPT)
        self._others: dict[int, tuple[int, RankCall]] = {}
        """By number: other ranks' calls that are still to come here."""
        self._count = 0
        self._steps = 0

    @property
    def operation(self) -> CallKind | None:
        """Of the newest call; None: there was none yet."""
        own = self._own
        return own[-1].operation if own else None

    def enter_call(self, operation: CallKind, steps: int) -> None:
        """Begins a call of this rank. Raises RanksDifferError when another rank's call of that number differs."""
        with self._lock:
            self._count += 1
            self._steps = steps
            call = RankCall(self._count, operation, steps)
            self._own.append(call)
            other = self._others.pop(call.number, None)
        if operation is not CallKind.STEP:
            self.announce(call)
        if other is not None and other[1].operation is not operation:
            raise self._difference(*other, call)

    def announce_end(self) -> None:
        """Announces that the script is over."""
        with self._lock:
            last_step = bool(self._own) and self._own[-1].operation is CallKind.STEP
            call = RankCall(self._count + 1, CallKind.END, self._steps + last_step)
        self.announce(call)

    def receive_call(self, rank: int, call: RankCall) -> None:
        """Takes in another rank's call. Makes every wait here raise when this rank's call of that number differs."""
        with self._lock:
            if call.number > self._count:
                self._others.setdefault(call.number, (rank, call))
                return
            own = next((own for own in self._own if own.number == call.number), None)
        if own is not None and own.operation is not call.operation:
            self._departure.fail_waits(self._difference(rank, call, own))

    def _difference(self, rank: int, call: RankCall, own: RankCall) -> RanksDifferError:
        there, here = call.render_for(f"rank {rank}"), own.render_for(f"this rank, {self._rank},")
        return RanksDifferError(
            f"{there}, but {here}: all ranks must make the same calls in the same order. Does the data of one of them "
            "end earlier? varuna.data.Batches gives all the same number of batches. Does the script decide by what it "
            "has counted or compared since its start? A process that joined the others later has not: register_state() "
            "gives it theirs"
        )
