"""What a morph cost, and where the time of a job went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from varuna_manager.domain.states import GenerationKind


def seconds_without_progress(*, last_progress_at: float, first_step_at: float) -> float:
    """From the last step that anyone completed (or the job's start) to this generation's first one."""
    return max(first_step_at - last_progress_at, 0.0)


def steps_redone(before: Iterable[tuple[int, int]], resumed_step: int) -> int:
    """Steps that are lost by this morph: they were completed, and no checkpoint held them.

    A generation that ends before it has done all lost steps again loses only what it did itself: what it had still to
    do was lost by an earlier morph, and counts there.

    Args:
        before: from which step each earlier generation went on, and its last one, oldest first.
        resumed_step: from where this one goes on.
    """
    lost, kept = 0, math.inf
    for resumed, last in reversed(list(before)):
        lost += max(int(min(last, kept)) - max(resumed, resumed_step), 0)
        kept = min(kept, resumed)
    return lost


@dataclass(frozen=True)
class Phase:
    """A part of a generation's life; `end` None: it lasts."""

    name: str
    start: float
    end: float | None


def phases(
    *,
    kind: GenerationKind,
    created_at: float,
    running_at: float | None,
    first_step_at: float | None,
    stop_requested_at: float | None,
    ended_at: float | None,
) -> list[Phase]:
    """launching, then calibrating or first_step and training, then stopping; each lasts until the next begins."""
    work = "calibrating" if kind is GenerationKind.CALIBRATION else "first_step"
    begins = [("launching", created_at), (work, running_at), ("stopping", stop_requested_at)]
    if kind is GenerationKind.TRAINING:
        begins.insert(2, ("training", first_step_at))
    found: list[Phase] = []
    for name, at in begins:
        if at is None:
            continue
        if found:
            at = max(at, found[-1].start)
            found[-1] = Phase(found[-1].name, found[-1].start, at)
        found.append(Phase(name, at, None))
    found[-1] = Phase(found[-1].name, found[-1].start, ended_at)
    return found


# ---------------------------------------------------------------- where a job's time went


@dataclass(frozen=True, kw_only=True)
class Past:
    """One generation of a job, as far as it matters here."""

    number: int
    kind: GenerationKind
    created_at: float
    first_step_at: float | None
    last_step_at: float | None
    ended_at: float | None
    steps: int
    """Completed."""
    redone: int
    """Of them."""
    bubble_share: float
    """Of a step's time: that in which the stages, on the average, computed nothing."""


@dataclass(kw_only=True)
class Spent:
    """Seconds of one generation; `waiting_s` is before it."""

    number: int
    kind: GenerationKind
    waiting_s: float = 0.0
    calibration_s: float = 0.0
    morph_s: float = 0.0
    training_s: float = 0.0
    bubbles_s: float = 0.0
    redone_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the time between `start` and `end` went: the parts add up to it."""

    start: float
    end: float
    generations: list[Spent] = field(default_factory=list)
    waiting_s: float = 0.0
    """For VMs, without any generation."""

    def total(self, name: str) -> float:
        """Of all generations: `name` is a field of Spent."""
        seconds: list[float] = [getattr(spent, name) for spent in self.generations]
        return sum(seconds)


def account(start: float, end: float, generations: Sequence[Past]) -> Account:
    """`generations`: oldest first. `start`: of the job; `end`: its end, or now.

    Time without a generation is waiting; from a generation's beginning to its first step, and from its last one to its
    end, is morphing; between the two is its steps' time, of which the redone ones have their part, and of the others'
    time the bubbles theirs.
    """
    spent: list[Spent] = []
    at, waiting_s = start, 0.0
    for past in generations:
        begins = _within(past.created_at, at, end)
        ends = _within(end if past.ended_at is None else past.ended_at, begins, end)
        one = Spent(number=past.number, kind=past.kind, waiting_s=begins - at)
        waiting_s += one.waiting_s
        if past.kind is GenerationKind.CALIBRATION:
            one.calibration_s = ends - begins
        else:
            _train(one, past, begins, ends)
        spent.append(one)
        at = ends
    return Account(start=start, end=max(end, at), generations=spent, waiting_s=waiting_s + max(end - at, 0.0))


def _train(one: Spent, past: Past, begins: float, ends: float) -> None:
    if past.first_step_at is None:
        one.morph_s = ends - begins
        return
    first = _within(past.first_step_at, begins, ends)
    last = ends if past.ended_at is None else _within(past.last_step_at or first, first, ends)
    one.morph_s = (first - begins) + (ends - last)
    stepping_s = last - first
    after_first = max(past.steps - 1, 0)
    # The first step counts as morphing: it is where the new generation's warming up is.
    redone = min(max(past.redone - 1, 0), after_first)
    one.redone_s = stepping_s * redone / after_first if after_first else 0.0
    one.bubbles_s = (stepping_s - one.redone_s) * past.bubble_share
    one.training_s = stepping_s - one.redone_s - one.bubbles_s


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), max(low, high))
