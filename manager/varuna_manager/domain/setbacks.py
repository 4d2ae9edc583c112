"""Which ended generations speak against a job: those that a fault ended before they got beyond its best step.

A job that gets on is left alone, however often it is restarted; one that dies again and again at the same place is
tried with growing pauses and then given up (`Rules.breaker`). What VMs do to a job never counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from varuna_manager.domain.states import EndCause

_BLAMELESS = frozenset({EndCause.VM_LOST, EndCause.NOTICE, EndCause.GROWTH, EndCause.SLOW_VM, EndCause.CANCELLED})


@dataclass(frozen=True, kw_only=True)
class PastGeneration:
    """A generation that has ended."""

    cause: EndCause | None
    reason: str
    last_step: int | None
    """None: it completed none."""
    ended_at: float


@dataclass(frozen=True, kw_only=True)
class Setbacks:
    reasons: tuple[str, ...] = ()
    """Why each of the last generations in a row ended without getting on, oldest first."""
    last_at: float = 0.0
    """When the newest of them ended."""
    best_step: int = 0
    """The newest step that any generation completed."""
    hangs: int = 0
    """Generations that were taken for hanging, over the job's whole life."""


def count_setbacks(generations: Iterable[PastGeneration]) -> Setbacks:
    """`generations`: those that ended, oldest first."""
    reasons: list[str] = []
    last_at, best_step, hangs = 0.0, 0, 0
    for generation in generations:
        hangs += generation.cause is EndCause.HANG
        got_on = (generation.last_step or 0) > best_step
        best_step = max(best_step, generation.last_step or 0)
        if got_on or generation.cause is EndCause.PROFILED:
            reasons.clear()
            last_at = 0.0
        elif generation.cause not in _BLAMELESS:
            reasons.append(generation.reason or "no reason is known")
            last_at = max(last_at, generation.ended_at)
    return Setbacks(reasons=tuple(reasons), last_at=last_at, best_step=best_step, hangs=hangs)
