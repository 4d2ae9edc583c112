"""Checkpoints that nobody asks for: how often, at which step boundary, and the last one before leaving.

All ranks must save at the same boundary. So every rank adds its wishes to the reduction at the end of a step, and what
comes back, the same everywhere, is done at the start of the next: by then the script has stepped its scheduler too.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from varuna.checkpoint import Cadence, Checkpointer, SaveOutcome, TrainingState, next_save_due
from varuna.departure import Departure, GenerationEnded

__all__ = ["AutomaticSaves", "Wishes", "wait_for_save"]

_log = structlog.get_logger("varuna")

_STEPS_KEPT = 9
"""Of which the median is what a mini-batch takes."""

_NEWS = 2.0
"""An interval that is so many times as long or short is told in the log."""

_LOOK_UP_S = 0.1
"""How often a wait for a save looks whether the worker must leave."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What one rank, or after the reduction any rank, wants at the coming step boundary."""

    save: bool = False
    busy: bool = False
    """An earlier save is in flight, so another must not start."""
    leave: bool = False
    """Save, then leave the generation."""


class AutomaticSaves:
    """The automatic checkpoints of one rank; does nothing but leave when there is no checkpointer."""

    def __init__(
        self, checkpointer: Checkpointer | None, departure: Departure, *, decides: bool, cadence: Cadence
    ) -> None:
        """`decides`: whether this rank is the one that says when a save is due."""
        self._checkpointer = checkpointer
        self._departure = departure
        self._decides = decides
        self._cadence = cadence
        self._last_save_s = time.monotonic()
        self._last_wishes_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._told_interval_s: float | None = None
        self._agreed = Wishes()

    def wishes(self) -> Wishes:
        """What this rank wants, for the reduction at the end of a step."""
        leave = self._departure.save_first
        if self._checkpointer is None:
            return Wishes(leave=leave)
        due = self._decides and self._is_due()
        return Wishes(save=due, busy=self._checkpointer.in_flight, leave=leave)

    def _is_due(self) -> bool:
        assert self._checkpointer is not None
        now_s = time.monotonic()
        if self._last_wishes_s is not None:
            self._steps_s.append(now_s - self._last_wishes_s)
        self._last_wishes_s = now_s
        stall_s, write_s = self._checkpointer.last_stall_s, self._checkpointer.last_write_s
        minibatch_s = statistics.median(self._steps_s) if self._steps_s else None
        due, _ = next_save_due(
            now_s,
            last_save_s=self._last_save_s,
            last_stall_s=stall_s,
            last_write_s=write_s,
            in_flight=self._checkpointer.in_flight,
            cadence=self._cadence,
            minibatch_s=minibatch_s,
        )
        if due and stall_s is not None:
            self._tell(self._cadence.interval_s(stall_s, write_s, minibatch_s), stall_s, write_s)
        return due

    def _tell(self, interval_s: float, stall_s: float, write_s: float | None) -> None:
        """Logs how often saves come, when it is news."""
        told_s = self._told_interval_s
        if told_s is not None and told_s / _NEWS <= interval_s <= told_s * _NEWS:
            return
        self._told_interval_s = interval_s
        _log.info(
            f"automatic checkpoints every {interval_s:.3g} s",
            stall_s=round(stall_s, 4),
            write_s=None if write_s is None else round(write_s, 4),
            stops_per_hour=self._cadence.stops_per_hour,
            pinned=self._cadence.pinned_interval_s is not None,
        )

    def agree(self, wishes: Wishes) -> None:
        """Takes note of what all ranks together want."""
        self._agreed = wishes

    @property
    def will_save(self) -> bool:
        """Whether all ranks save at the coming boundary."""
        return self._agreed.leave or (self._agreed.save and not self._agreed.busy)

    def at_boundary(
        self, step: int, state: Callable[[], TrainingState], why_not: Callable[[], str | None] = lambda: None
    ) -> None:
        """Does what was agreed, for the state after `step` steps. Raises GenerationEnded when that was to leave.

        `why_not` is asked before a save, by all ranks: what makes the state one that must not be saved.
        """
        agreed, self._agreed = self._agreed, Wishes()
        if agreed.leave:
            self._save_and_leave(step, state, why_not)
        elif agreed.save and not agreed.busy and self._checkpointer is not None:
            self._last_save_s = time.monotonic()
            if (reason := why_not()) is None:
                self._checkpointer.save(step, state())
            else:
                _log.error("no checkpoint is made of this state", step=step, reason=reason)

    def _save_and_leave(self, step: int, state: Callable[[], TrainingState], why_not: Callable[[], str | None]) -> None:
        outcome = "not saved: the job has no checkpoint store"
        if self._checkpointer is not None and (reason := why_not()) is not None:
            outcome = f"not saved: {reason}"
        elif self._checkpointer is not None:
            wait_for_save(self._checkpointer, self._departure)
            self._checkpointer.save(step, state())
            saved = wait_for_save(self._checkpointer, self._departure)
            outcome = "not saved" if saved is None else f"{saved.result} {saved.error}".strip()
        self._departure.leave(GenerationEnded(f"the agent said to save and leave; step {step}: {outcome}"))
        self._departure.check()


def wait_for_save(checkpointer: Checkpointer, departure: Departure) -> SaveOutcome | None:
    """Waits for the save in flight and returns the newest outcome. Raises what makes the worker leave."""
    outcome = checkpointer.wait(_LOOK_UP_S)
    while checkpointer.in_flight:
        departure.check()
        outcome = checkpointer.wait(_LOOK_UP_S)
    return outcome
