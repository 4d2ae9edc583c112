"""What a morph cost: time without progress, and steps done twice."""

from __future__ import annotations


def seconds_without_progress(*, last_progress_at: float, first_step_at: float) -> float:
    """From the last step that anyone completed (or the job's start) to this generation's first one."""
    return max(first_step_at - last_progress_at, 0.0)


def steps_redone(*, last_step_before: int | None, resumed_step: int) -> int:
    """Steps that were completed before and had to be done again, since no checkpoint held them."""
    return max((last_step_before or 0) - resumed_step, 0)
