"""Whether all ranks make the same calls: a rank whose data ends earlier leaves the loop, and the others would wait.

Every call in which ranks wait for each other has a number, the same on all of them: step, evaluate, checkpoint and so
on, up to the end of the script. A rank announces every call but steps (`varuna.presence` carries that), so steps cost
nothing; and a rank whose call of that number is another one raises, with one line, instead of waiting for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from varuna.departure import Departure, RanksDifferError

__all__ = ["Call", "Calls", "Operation"]

_KEPT = 64
"""Own calls that are remembered; ranks that wait for each other are never so far apart."""


class Operation(Enum):
    """What ranks do together. The value is what it is called in a message."""

    STEP = b"s"
    EVALUATE = b"e"
    CHECKPOINT = b"c"
    LOAD = b"o"
    RESUME = b"r"
    END = b"z"


class Call(NamedTuple):
    number: int
    """From 1, over all operations."""
    operation: Operation
    steps: int
    """Done before it."""

    def render(self, who: str) -> str:
        if self.operation is Operation.END:
            return f"{who} has ended its script after step {self.steps}"
        if self.operation is Operation.STEP:
            return f"{who} is in step {self.steps + 1}"
        name = {Operation.LOAD: "load_checkpoint"}.get(self.operation, self.operation.name.lower())
        return f"{who} is in {name}() after step {self.steps}"


class Calls:
    """This rank's calls, and what is known of the others'."""

    def __init__(self, rank: int, departure: Departure) -> None:
        self.announce: Callable[[Call], None] = lambda call: None
        """Sends a call to the other ranks."""
        self._rank = rank
        self._departure = departure
        self._lock = threading.Lock()
        self._own: deque[Call] = deque(maxlen=_KEPT)
        self._others: dict[int, tuple[int, Call]] = {}
        """By number: of calls that are still to come here."""
        self._count = 0
        self._steps = 0

    def enter(self, operation: Operation, steps: int) -> None:
        """This rank begins a call. Raises RanksDifferError when another rank's call of that number is another one."""
        with self._lock:
            self._count += 1
            self._steps = steps
            call = Call(self._count, operation, steps)
            self._own.append(call)
            other = self._others.pop(call.number, None)
        if operation is not Operation.STEP:
            self.announce(call)
        if other is not None and other[1].operation is not operation:
            raise self._difference(*other, call)

    def end(self) -> None:
        """The script is over."""
        with self._lock:
            last_step = bool(self._own) and self._own[-1].operation is Operation.STEP
            call = Call(self._count + 1, Operation.END, self._steps + last_step)
        self.announce(call)

    def receive(self, rank: int, call: Call) -> None:
        """Another rank has announced a call. Makes every wait here raise when this rank's is another one."""
        with self._lock:
            if call.number > self._count:
                self._others.setdefault(call.number, (rank, call))
                return
            own = next((own for own in self._own if own.number == call.number), None)
        if own is not None and own.operation is not call.operation:
            self._departure.fail(self._difference(rank, call, own))

    def _difference(self, rank: int, call: Call, own: Call) -> RanksDifferError:
        there, here = call.render(f"rank {rank}"), own.render(f"this rank, {self._rank},")
        return RanksDifferError(
            f"{there}, but {here}: all ranks must make the same calls in the same order. Does the data of one of them "
            "end earlier? varuna.data.Batches gives all the same number of batches"
        )
