"""Automatic checkpoints: how often, at which step boundary, and the last one before leaving.

All ranks must save at the same boundary. So every rank adds its requests to the reduction at the end of a step. The
result, the same on all ranks, is applied at the start of the next step: by then the script has stepped its scheduler.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import structlog

from varuna.checkpoint import CheckpointWriter, SaveOutcome, TrainingState, decide_save
from varuna.distributed.agreement import BoundaryRequests
from varuna.distributed.departure import Departure, GenerationEnded
from varuna_planner.liveput.checkpoint_interval import Cadence

__all__ = ["AutomaticCheckpoints", "wait_for_save"]

_log = structlog.get_logger("varuna")

_STEPS_KEPT = 9
"""The newest step times, whose median is the time of a mini-batch."""

_LOGGED_CHANGE = 2.0
"""An interval that changes by at least this factor is logged."""

_LOOK_UP_S = 0.1
"""How often a wait for a save checks whether the worker must leave."""


class AutomaticCheckpoints:
    """Decides when one rank saves automatically. Without a writer it only leaves when the agent asks for it."""

    def __init__(
        self,
        writer: CheckpointWriter | None,
        departure: Departure,
        *,
        decides: bool,
        cadence: Cadence,
        committed_step: int = 0,
        before: AutomaticCheckpoints | None = None,
    ) -> None:
        """`decides`: whether this rank decides when a save is due. `committed_step`: of the newest checkpoint that is
        known when the generation begins; 0: none is. `before`: of this process in the generation before; None: it is
        new."""
        self._writer = writer
        self._departure = departure
        self._decides = decides
        self._copied, self._uncopied = cadence, cadence.without_copies()
        self._cadence = self._uncopied
        """Of the two, the one by what other VMs really keep."""
        self._last_save_s: float = time.monotonic() if before is None else before._last_save_s
        """When this process began its newest save, or was new."""
        self._saved_step: int | None = committed_step if committed_step or before is None else before._saved_step
        """The step of the newest checkpoint; None: it is that of the newest save, as far as is known."""
        self._last_request_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._logged_interval_s: float | None = None
        self._agreed = BoundaryRequests()

    def choose_requests(self, step: int) -> BoundaryRequests:
        """This rank's requests, for the reduction at the end of `step`."""
        leaving = BoundaryRequests(
            leave=self._departure.save_first,
            hold=self._departure.hold_first,
            cannot_hold=not self._departure.can_hold,
        )
        if self._writer is None:
            return leaving
        return replace(leaving, save=self._decides and self._is_due(step), busy=self._writer.in_flight)

    def _is_due(self, step: int) -> bool:
        assert self._writer is not None
        now_s = time.monotonic()
        if self._last_request_s is not None:
            self._steps_s.append(now_s - self._last_request_s)
        self._last_request_s = now_s
        stall_s, write_s = self._writer.last_stall_s, self._writer.last_write_s
        minibatch_s = statistics.median(self._steps_s) if self._steps_s else None
        due, _ = decide_save(
            now_s,
            last_save_s=self._find_last_save_s(now_s, step, minibatch_s),
            last_stall_s=stall_s,
            last_write_s=write_s,
            in_flight=self._writer.in_flight,
            cadence=self._cadence,
            minibatch_s=minibatch_s,
        )
        if due and stall_s is not None:
            self._log_interval(self._cadence.interval_s(stall_s, write_s, minibatch_s), stall_s, write_s)
        return due

    def _find_last_save_s(self, now_s: float, step: int, minibatch_s: float | None) -> float:
        """When the newest save began. Generations may be shorter than the interval: a new process reckons by the steps
        since the newest checkpoint, and so does one whose save has come to nothing because its generation ended."""
        if self._saved_step is None or minibatch_s is None:
            return self._last_save_s
        return min(self._last_save_s, now_s - (step - self._saved_step) * minibatch_s)

    def _log_interval(self, interval_s: float, stall_s: float, write_s: float | None) -> None:
        """Logs the interval of saves when it has changed much."""
        logged_s = self._logged_interval_s
        if logged_s is not None and logged_s / _LOGGED_CHANGE <= interval_s <= logged_s * _LOGGED_CHANGE:
            return
        self._logged_interval_s = interval_s
        _log.info(
            f"automatic checkpoints every {interval_s:.3g} s",
            stall_s=round(stall_s, 4),
            write_s=None if write_s is None else round(write_s, 4),
            stops_per_hour=float(f"{self._cadence.stops_per_hour:.3g}"),
            pinned=self._cadence.pinned_interval_s is not None,
        )

    def record_agreement(self, agreed: BoundaryRequests) -> None:
        """Records the requests of all ranks together."""
        self._agreed = agreed

    def record_copies(self, *, are_whole: bool) -> None:
        """Notes whether other VMs have whole copies of a state. As long as they have none, each loss of a stage needs
        the checkpoint, so saves are more often."""
        self._cadence = self._copied if are_whole else self._uncopied

    @property
    def keeps_state(self) -> bool:
        """Whether the state at the coming boundary is what the training goes on from elsewhere."""
        return self._agreed.leave or self._agreed.hold or (self._agreed.save and not self._agreed.busy)

    def apply_agreement(
        self, step: int, state: Callable[[], TrainingState], find_fault: Callable[[], str | None] = lambda: None
    ) -> None:
        """Applies the agreed requests to the state after `step` steps. Raises GenerationEnded when one was to leave.

        `find_fault`: called by all ranks before a save, returns why this state must not be saved, or None. A state that
        is saved must not change before `finish_copy`.
        """
        agreed, self._agreed = self._agreed, BoundaryRequests()
        if agreed.leave or (agreed.hold and agreed.cannot_hold):
            self._save_and_leave(step, state, find_fault)
        elif agreed.hold:
            self._departure.leave_generation(GenerationEnded(f"the agent asked to leave with the state of step {step}"))
            self._departure.raise_if_leaving()
        elif agreed.save and not agreed.busy and self._writer is not None:
            self._note_save()
            if (reason := find_fault()) is None:
                self._writer.start_save(step, state(), beside_passes=True)
            else:
                _log.error("this state is not saved", step=step, reason=reason)

    def _note_save(self) -> None:
        """A save begins."""
        self._last_save_s, self._saved_step = time.monotonic(), None

    def finish_copy(self) -> None:
        """Waits until the state that is saved may change."""
        if self._writer is not None:
            self._writer.finish_copy()

    def _save_and_leave(
        self, step: int, state: Callable[[], TrainingState], find_fault: Callable[[], str | None]
    ) -> None:
        outcome = "not saved: the job has no checkpoint store"
        if self._writer is not None and (reason := find_fault()) is not None:
            outcome = f"not saved: {reason}"
        elif self._writer is not None:
            wait_for_save(self._writer, self._departure)
            self._note_save()
            self._writer.start_save(step, state())
            saved = wait_for_save(self._writer, self._departure)
            outcome = "not saved" if saved is None else f"{saved.result} {saved.error}".strip()
        self._departure.leave_after_save(GenerationEnded(f"asked to save and leave; step {step}: {outcome}"))
        self._departure.raise_if_leaving()


def wait_for_save(writer: CheckpointWriter, departure: Departure) -> SaveOutcome | None:
    """Waits for the save in flight and returns the newest outcome. Raises what makes the worker leave."""
    outcome = writer.wait(_LOOK_UP_S)
    while writer.in_flight:
        departure.raise_if_leaving()
        outcome = writer.wait(_LOOK_UP_S)
    return outcome
