"""All GPUs of a job are of one type: replicas of different speed would wait for the slowest, and a profile is of one
type."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OTHER_TYPE_FACTOR", "choose_job_type"]

OTHER_TYPE_FACTOR = 2
"""A job leaves the type of its GPUs when there are so many times as many of another type."""


def choose_job_type(usable: Mapping[str, int], present: str | None) -> str | None:
    """The type of the GPUs that a job may have; None: there are none.

    Args:
        usable: GPUs that the job could have, those that it has included, by type; an empty name is a type, too.
        present: the type that it has; None: it has none.
    """
    counts = {gpu_type: count for gpu_type, count in usable.items() if count}
    if not counts:
        return None
    best = max(sorted(counts), key=lambda gpu_type: counts[gpu_type])
    if present in counts and counts[best] < OTHER_TYPE_FACTOR * counts[present]:
        return present
    return best
