"""Limits of a job: time, cost, and waiting. A job that reaches one is saved and ended.

All three count from the job's submission or from its last retry, because a retried job is meant to go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_manager.domain.states import JobState


@dataclass(frozen=True, kw_only=True)
class JobLimitsView:
    """The limits of one job, and how much of them it has used. None: there is no limit of this kind."""

    max_duration_s: float | None = None
    max_cost: float | None = None
    queue_timeout_s: float | None = None
    waits_since: float = 0.0
    """Its submission, or its last retry."""
    run_since: float | None = None
    """Its first start after that; None: it has not started."""
    cost: float = 0.0
    """The cost of its generations since then, on VMs whose price is known."""


def find_reached_limit(now: float, state: JobState, limits: JobLimitsView) -> str:
    """The limit that the job has reached, in one line; empty: none."""
    if state not in (JobState.QUEUED, JobState.RUNNING):
        return ""
    if limits.run_since is None:
        waited_s = now - limits.waits_since
        if limits.queue_timeout_s is not None and waited_s >= limits.queue_timeout_s:
            return f"it has waited for {waited_s:.0f} s to start (limits.queue_timeout_s {limits.queue_timeout_s:g})"
        return ""
    ran_s = now - limits.run_since
    if limits.max_duration_s is not None and ran_s >= limits.max_duration_s:
        return f"it started {ran_s:.0f} s ago (limits.max_duration_s {limits.max_duration_s:g})"
    if limits.max_cost is not None and limits.cost >= limits.max_cost:
        return f"it has cost {limits.cost:.2f} (limits.max_cost {limits.max_cost:g})"
    return ""
