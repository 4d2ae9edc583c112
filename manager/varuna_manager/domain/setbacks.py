"""Setbacks: ended generations that count against a job, because a fault ended them before they passed its best step.

A job that makes progress may be restarted any number of times. One that dies repeatedly at the same place is tried
again with growing pauses, and then fails (`Rules.breaker`). What VMs, agents and managers do to a job never counts;
what an agent does repeatedly only makes the pauses longer. A want of memory does not count either: the plan after it is
more careful, and there are few of those (`memory_margin`). Failures of the script are counted separately, and always:
the job's `max_restarts_on_errors` limits them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from varuna_manager.domain.states import EndCause

_BLAMELESS = frozenset(
    {
        EndCause.OUT_OF_MEMORY,
        EndCause.VM_LOST,
        EndCause.MANAGER_AWAY,
        EndCause.NOTICE,
        EndCause.GROWTH,
        EndCause.HANDED_OVER,
        EndCause.SLOW_VM,
        EndCause.SHRUNK,
        EndCause.PREEMPTED,
        EndCause.CANCELLED,
        EndCause.LIMIT,
    }
)

_EXCUSED = frozenset({EndCause.AGENT_ENDED, EndCause.LAUNCH_REFUSED, EndCause.UNREACHABLE})
"""Not the job's fault, but likely to happen again at once, so each further try waits a little longer."""


@dataclass(frozen=True, kw_only=True)
class PastGeneration:
    """A generation that has ended."""

    cause: EndCause | None
    reason: str
    last_step: int | None
    """None: it completed none."""
    ended_at: float
    forgiven: bool = False
    """Whether the user has retried the job since."""


@dataclass(frozen=True, kw_only=True)
class Setbacks:
    reasons: tuple[str, ...] = ()
    """Why each of the last generations in a row ended without progress, oldest first."""
    last_at: float = 0.0
    """When the newest of them ended."""
    best_step: int = 0
    """The newest step that any generation completed."""
    hangs: int = 0
    """Generations that ended as hangs, over the job's whole life."""
    errors: int = 0
    """How often the script failed."""
    errors_in_a_row: int = 0
    """Failures of the script since the job last made progress."""
    excused: int = 0
    """Generations since then that agents or the network ended. They make the pauses longer, but fail no job."""

    @property
    def backoff_s(self) -> float:
        """The pause after `last_at`: none after the first failure, then 1, 2, 4, ... up to 30 seconds."""
        failures = len(self.reasons) + self.errors_in_a_row + self.excused
        return 0.0 if failures <= 1 else min(2.0 ** (failures - 2), 30.0)


def count_setbacks(generations: Iterable[PastGeneration]) -> Setbacks:
    """`generations`: those that ended, oldest first."""
    reasons: list[str] = []
    last_at, best_step, hangs, errors, in_a_row, excused = 0.0, 0, 0, 0, 0, 0
    for generation in generations:
        hangs += generation.cause is EndCause.HANG
        got_on = (generation.last_step or 0) > best_step
        best_step = max(best_step, generation.last_step or 0)
        failed = generation.cause is EndCause.SCRIPT_FAILED and not generation.forgiven
        errors += failed
        if got_on or generation.cause is EndCause.PROFILED:
            reasons.clear()
            last_at, in_a_row, excused = 0.0, 0, 0
        elif failed:
            in_a_row += 1
            last_at = max(last_at, generation.ended_at)
        elif generation.cause in _EXCUSED:
            excused += 1
            last_at = max(last_at, generation.ended_at)
        elif generation.cause not in _BLAMELESS and not generation.forgiven:
            reasons.append(generation.reason or "no reason is known")
            last_at = max(last_at, generation.ended_at)
    return Setbacks(
        reasons=tuple(reasons),
        last_at=last_at,
        best_step=best_step,
        hangs=hangs,
        errors=errors,
        errors_in_a_row=in_a_row,
        excused=excused,
    )
