"""What the time without progress before a generation's first step went to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BEGINNINGS = ("wait", "process")
"""What a worker does before it can meet the others, who wait for the last."""
_NAMED = 3
"""Parts that a line of text names: the longest."""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    seconds: float
    rank: int | None = None
    """Whose it was, where it was one's: the rank's that all others waited for."""

    def to_document(self) -> dict[str, Any]:
        return {"name": self.name, "seconds": round(self.seconds, 4), "rank": self.rank}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Part:
        return cls(**document)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When a morph came from one thing to the next; None: it did not, or it is not known."""

    last_progress_at: float
    """The last step of the generation before, or the job's start."""
    told_to_stop_at: float | None = None
    ended_at: float | None = None
    """The generation before, both."""
    created_at: float
    ready_at: float | None = None
    """Every rank of this one had built its part and loaded its state."""
    first_step_at: float


def slower_start(one: Sequence[Part], other: Sequence[Part]) -> Sequence[Part]:
    """Of two ranks' starts, that of the one which began later: the others waited for it."""
    return max(one, other, key=lambda parts: sum(part.seconds for part in parts if part.name in _BEGINNINGS))


def downtime(moments: Moments, start: Sequence[Part]) -> tuple[Part, ...]:
    """Its parts in order; together they are that time, to within the travel of messages.

    notice (until the generation before was told to stop), stop (until it had ended), plan (until this one was decided
    on, a wait for VMs included), launch (until agents had it), the slowest rank's `start`, and the first step.
    """
    found, at = [], moments.last_progress_at
    for name, until in (
        ("notice", moments.told_to_stop_at),
        ("stop", moments.ended_at),
        ("plan", moments.created_at),
    ):
        if until is not None and until > at:
            found.append(Part(name=name, seconds=until - at))
            at = until
    ready_at = moments.first_step_at if moments.ready_at is None else moments.ready_at
    launch_s = ready_at - moments.created_at - sum(part.seconds for part in start)
    found += [Part(name="launch", seconds=max(launch_s, 0.0)), *start]
    return (*found, Part(name="step", seconds=max(moments.first_step_at - ready_at, 0.0)))


def longest(parts: Sequence[Part]) -> str:
    """The longest parts in a few words."""
    found = sorted(parts, key=lambda part: -part.seconds)[:_NAMED]
    return ", ".join(
        f"{part.name} {part.seconds:.1f} s" + (f" of rank {part.rank}" if part.rank is not None else "")
        for part in found
        if part.seconds >= 0.05
    )
