"""What a morph cost, and where the time of a job went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from varuna_manager.domain.states import TERMINAL_JOB_STATES, GenerationKind


def count_seconds_without_progress(*, last_progress_at: float, first_step_at: float) -> float:
    """From the last step of any generation (or the job's start, or its last retry) to this generation's first step."""
    return max(first_step_at - last_progress_at, 0.0)


def count_steps_redone(before: Iterable[tuple[int, int]], resumed_step: int) -> int:
    """Steps that this morph loses: they were completed, and no checkpoint has them.

    A generation that ends before it has redone all lost steps loses only the steps that it did itself. The others were
    lost by an earlier morph and count there.

    Args:
        before: the step from which each earlier generation went on, and its last step, oldest first.
        resumed_step: the step from which this generation goes on.
    """
    lost, kept = 0, math.inf
    for resumed, last in reversed(list(before)):
        lost += max(int(min(last, kept)) - max(resumed, resumed_step), 0)
        kept = min(kept, resumed)
    return lost


BETWEEN_STEPS = ("data", "evaluation", "checkpoints", "script")
"""What a script does between two steps: it makes batches, evaluates, checkpoints, and does all else."""


@dataclass(frozen=True)
class GenerationPhase:
    """A part of a generation's life; `end` None: it has not ended."""

    name: str
    start: float
    end: float | None


def list_phases(
    *,
    kind: GenerationKind,
    created_at: float,
    running_at: float | None,
    first_step_at: float | None,
    stop_requested_at: float | None,
    ended_at: float | None,
) -> list[GenerationPhase]:
    """launching, then calibrating or first_step and training, then stopping; each lasts until the next begins."""
    work = "calibrating" if kind is GenerationKind.CALIBRATION else "first_step"
    begins = [("launching", created_at), (work, running_at), ("stopping", stop_requested_at)]
    if kind is GenerationKind.TRAINING:
        begins.insert(2, ("training", first_step_at))
    known = [(name, at) for name, at in begins if at is not None]
    starts = list(accumulate((at for _, at in known), max))
    ends = (*starts[1:], ended_at)
    return [GenerationPhase(name, start, end) for (name, _), start, end in zip(known, starts, ends, strict=True)]


# ---------------------------------------------------------------- where a job's time went


class Pause(NamedTuple):
    """The time from a job's end to its retry."""

    start: float
    end: float

    def overlap_s(self, start: float, end: float) -> float:
        return max(min(self.end, end) - max(self.start, start), 0.0)


def list_pauses(history: Iterable[Mapping[str, Any]]) -> tuple[Pause, ...]:
    """`history`: the job's, oldest first."""
    changes = pairwise(history)
    return tuple(Pause(end["at"], retry["at"]) for end, retry in changes if end["state"] in TERMINAL_JOB_STATES)


@dataclass(frozen=True, kw_only=True)
class GenerationTimes:
    """The moments and steps of one generation."""

    number: int
    kind: GenerationKind
    created_at: float
    first_step_at: float | None
    last_step_at: float | None
    ended_at: float | None
    steps: int
    """Completed steps."""
    redone: int
    """Those that an earlier generation had completed, too."""
    bubble_share: float
    """The fraction of the time within steps in which the stages, on average, computed nothing."""
    between_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds between steps after the first, by cause (`BETWEEN_STEPS`)."""


@dataclass(kw_only=True)
class TimeOfGeneration:
    """Where the time of one generation went; `waiting_s` is the time before it."""

    number: int
    kind: GenerationKind
    waiting_s: float = 0.0
    calibration_s: float = 0.0
    morph_s: float = 0.0
    training_s: float = 0.0
    bubbles_s: float = 0.0
    redone_s: float = 0.0
    between_s: Mapping[str, float] = field(default_factory=dict)
    """Between steps that counted, by cause."""


@dataclass(frozen=True, kw_only=True)
class TimeOfJob:
    """Where the time between `start` and `end` went, but for `paused_s`. The parts add up to it."""

    start: float
    end: float
    generations: list[TimeOfGeneration] = field(default_factory=list)
    waiting_s: float = 0.0
    """Time without any generation, for want of VMs."""
    paused_s: float = 0.0
    """From the job's ends to its retries: it was over, and lost no time."""

    @property
    def total_s(self) -> float:
        return self.end - self.start - self.paused_s

    @property
    def useful_s(self) -> float:
        """Time inside steps that counted, bubbles included; without what lies between steps."""
        return self.sum_seconds("training_s") + self.sum_seconds("bubbles_s")

    @property
    def elapsed_s(self) -> float:
        """Time since the job first started, waiting for VMs after that included; 0 before."""
        return self.total_s - self.generations[0].waiting_s if self.generations else 0.0

    @property
    def goodput(self) -> float:
        """The fraction of `elapsed_s` that is useful. Whatever shows a job's goodput takes it from here."""
        return self.useful_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def sum_seconds(self, name: str) -> float:
        """The sum over all generations: `name` is a field of TimeOfGeneration."""
        seconds: list[float] = [getattr(spent, name) for spent in self.generations]
        return sum(seconds)

    def sum_between_steps(self, cause: str) -> float:
        return sum(spent.between_s.get(cause, 0.0) for spent in self.generations)


def account_time(
    start: float, end: float, generations: Sequence[GenerationTimes], pauses: Sequence[Pause] = ()
) -> TimeOfJob:
    """`generations`: oldest first. `start`: of the job; `end`: its end, or now.

    Time without a generation is waiting, or a pause from an end to the retry. The time before a generation's first step
    and after its last is morphing. The time between the two is divided among redone steps, what the script did between
    steps, bubbles and training.
    """
    spent: list[TimeOfGeneration] = []
    at, waiting_s, paused_s = start, 0.0, 0.0
    for past in generations:
        begins = _within(past.created_at, at, end)
        ends = _within(end if past.ended_at is None else past.ended_at, begins, end)
        pause_s = _sum_pauses(pauses, at, begins)
        one = TimeOfGeneration(number=past.number, kind=past.kind, waiting_s=begins - at - pause_s)
        waiting_s, paused_s = waiting_s + one.waiting_s, paused_s + pause_s
        if past.kind is GenerationKind.CALIBRATION:
            one.calibration_s = ends - begins
        else:
            _train(one, past, begins, ends)
        spent.append(one)
        at = ends
    end = max(end, at)
    pause_s = _sum_pauses(pauses, at, end)
    return TimeOfJob(
        start=start,
        end=end,
        generations=spent,
        waiting_s=waiting_s + end - at - pause_s,
        paused_s=paused_s + pause_s,
    )


def _sum_pauses(pauses: Sequence[Pause], start: float, end: float) -> float:
    return sum(pause.overlap_s(start, end) for pause in pauses)


def _train(one: TimeOfGeneration, past: GenerationTimes, begins: float, ends: float) -> None:
    if past.first_step_at is None:
        one.morph_s = ends - begins
        return
    first = _within(past.first_step_at, begins, ends)
    last = ends if past.ended_at is None else _within(past.last_step_at or first, first, ends)
    one.morph_s = (first - begins) + (ends - last)
    stepping_s = last - first
    after_first = max(past.steps - 1, 0)
    # The first step counts as morphing because the new generation warms up in it.
    redone = min(max(past.redone - 1, 0), after_first)
    one.redone_s = stepping_s * redone / after_first if after_first else 0.0
    useful_s = stepping_s - one.redone_s
    # Rank 0's clock measures what lies between steps, the manager's the rest: the parts must add up all the same.
    fitting = useful_s / max(stepping_s, sum(past.between_s.values())) if useful_s else 0.0
    one.between_s = {cause: seconds * fitting for cause, seconds in past.between_s.items()}
    in_steps_s = useful_s - sum(one.between_s.values())
    one.bubbles_s = in_steps_s * past.bubble_share
    one.training_s = in_steps_s - one.bubbles_s


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), max(low, high))
