"""Where the time without progress before a generation's first step went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_BEGINNINGS = ("wait", "process")
"""What a worker does before the rendezvous, where all wait for the last one."""
_WORDS = {"notice": "until the stop", "share": "survivors' shares", "step": "first step"}
"""For people, where a name alone says too little."""
_NAMED = 3
"""The number of parts, longest first, that a line of text names."""


@dataclass(frozen=True, kw_only=True)
class DowntimePart:
    name: str
    seconds: float
    rank: int | None = None
    """The rank that all others waited for; None: the part is not one rank's."""

    def to_document(self) -> dict[str, Any]:
        return {"name": self.name, "seconds": round(self.seconds, 4), "rank": self.rank}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> DowntimePart:
        return cls(**document)


@dataclass(frozen=True, kw_only=True)
class MorphMoments:
    """When each part of a morph began; None: it did not happen, or is not known."""

    last_progress_at: float
    """The last step of the previous generation, or the job's start or last retry."""
    is_calibrated: bool = False
    """Whether the previous generation was a calibration, which makes no step."""
    stop_sent_at: float | None = None
    ended_at: float | None = None
    """When the previous generation had ended. `stop_sent_at` is its, too."""
    left_at: float | None = None
    """When all of its processes had left it: after a loss, some end their shares of the step first."""
    created_at: float
    ready_at: float | None = None
    """When every rank of the new generation had built its part and loaded its state."""
    first_step_at: float


def choose_slower_start(one: Sequence[DowntimePart], other: Sequence[DowntimePart]) -> Sequence[DowntimePart]:
    """The start of the rank that reached the rendezvous later, for which the others waited."""
    return max(one, other, key=lambda parts: sum(part.seconds for part in parts if part.name in _BEGINNINGS))


def split_downtime(moments: MorphMoments, start: Sequence[DowntimePart]) -> tuple[DowntimePart, ...]:
    """The parts of the downtime in order. Together they are the downtime, to within the travel time of messages.

    notice (until the stop of the previous generation was sent) and stop (until that had ended), or calibration (all of
    the previous generation, if it was one); share (until its survivors had left it, too), plan (until the new one was
    decided, including a wait for VMs), launch (until agents had it), the slowest rank's `start`, the first step.
    """
    found, at = [], moments.last_progress_at
    ends: tuple[tuple[str, float | None], ...] = (("notice", moments.stop_sent_at), ("stop", moments.ended_at))
    if moments.is_calibrated:
        ends = (("calibration", moments.ended_at),)
    for name, until in (*ends, ("share", moments.left_at), ("plan", moments.created_at)):
        if until is not None and until > at:
            found.append(DowntimePart(name=name, seconds=until - at))
            at = until
    ready_at = moments.first_step_at if moments.ready_at is None else moments.ready_at
    launch_s = ready_at - moments.created_at - sum(part.seconds for part in start)
    found += [DowntimePart(name="launch", seconds=max(launch_s, 0.0)), *_cut_beginning(start, -launch_s)]
    return (*found, DowntimePart(name="step", seconds=max(moments.first_step_at - ready_at, 0.0)))


def _cut_beginning(parts: Sequence[DowntimePart], seconds: float) -> list[DowntimePart]:
    """The parts without their first seconds: a survivor waits for its rank from before the generation is decided."""
    left = []
    for part in parts:
        cut_s = min(part.seconds, max(seconds, 0.0))
        seconds -= cut_s
        left.append(replace(part, seconds=part.seconds - cut_s))
    return left


def render_longest_parts(parts: Sequence[DowntimePart]) -> str:
    """The longest parts, as text."""
    found = sorted(parts, key=lambda part: -part.seconds)[:_NAMED]
    return ", ".join(_render_part(part) for part in found if part.seconds >= 0.05)


def _render_part(part: DowntimePart) -> str:
    of_rank = "" if part.rank is None else f" of rank {part.rank}"
    return f"{_WORDS.get(part.name, part.name)} {part.seconds:.1f} s{of_rank}"
