"""What a morph cost, and where the time of a job went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from varuna_manager.domain.states import GenerationKind


def seconds_without_progress(*, last_progress_at: float, first_step_at: float) -> float:
    """From the last step that anyone completed (or the job's start) to this generation's first one."""
    return max(first_step_at - last_progress_at, 0.0)


def steps_redone(*, last_step_before: int | None, resumed_step: int) -> int:
    """Steps that were completed before and had to be done again, since no checkpoint held them."""
    return max((last_step_before or 0) - resumed_step, 0)


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


# ---------------------------------------------------------------- what VMs cost


@dataclass(frozen=True, kw_only=True)
class Use:
    """So many GPUs of a VM for some time."""

    vm_id: str
    seconds: float
    gpus: int
    vm_gpus: int
    price_per_hour: float | None
    """Of the whole VM."""


@dataclass(kw_only=True)
class Bill:
    """Hours of one VM, or of several; the cost of those with a price."""

    vm_id: str = ""
    hours: float = 0.0
    gpu_hours: float = 0.0
    price_per_hour: float | None = None
    cost: float | None = None


def bills(uses: Iterable[Use]) -> list[Bill]:
    """By VM, the dearest first. A VM that jobs share counts by the part of its GPUs."""
    by_vm: dict[str, Bill] = {}
    for use in uses:
        bill = by_vm.setdefault(use.vm_id, Bill(vm_id=use.vm_id, price_per_hour=use.price_per_hour))
        hours = use.seconds / 3600 * use.gpus / max(use.vm_gpus, 1)
        bill.hours += hours
        bill.gpu_hours += use.seconds / 3600 * use.gpus
        if use.price_per_hour is not None:
            bill.cost = (bill.cost or 0.0) + hours * use.price_per_hour
    return sorted(by_vm.values(), key=lambda bill: (-(bill.cost or 0.0), -bill.hours, bill.vm_id))


def total(found: Iterable[Bill]) -> Bill:
    """Of several VMs; its cost is None when none has a price."""
    whole = Bill()
    for bill in found:
        whole.hours += bill.hours
        whole.gpu_hours += bill.gpu_hours
        if bill.cost is not None:
            whole.cost = (whole.cost or 0.0) + bill.cost
    return whole
