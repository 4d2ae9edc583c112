"""Which types of GPU a job may have, in a fleet with several.

A job that has the fleet to itself may mix types: the planner gives slower GPUs less to do. Where several jobs share the
fleet, all GPUs of a job are of one type, because a job's share is a number of GPUs, which says nothing if they differ.
So are those of a job that may have no more GPUs than there are of one type.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from varuna_manager.domain.spec import Resources

__all__ = ["OTHER_TYPE_FACTOR", "OnlyType", "choose_job_type", "explain_one_type"]

OTHER_TYPE_FACTOR = 2
"""A job leaves the type of its GPUs when there are so many times as many of another type."""


class OnlyType(NamedTuple):
    """The one type that a job may have."""

    gpu_type: str
    """The whole name of its GPUs."""
    why: str
    """Why it may not mix types."""


def explain_one_type(wanted: Resources, usable: Mapping[str, int], *, is_alone: bool) -> str:
    """Why all GPUs of a job are of one type; empty: it may mix types.

    Args:
        usable: GPUs that the job could have, by type.
        is_alone: whether it shares the fleet with no other job.
    """
    if not wanted.mix_gpu_types:
        return "resources.mix_gpu_types is false"
    if not is_alone:
        return "several jobs share the fleet"
    if wanted.max_gpus is not None and max(usable.values(), default=0) >= wanted.max_gpus:
        return f"there are enough for resources.max_gpus {wanted.max_gpus}"
    return ""


def choose_job_type(
    usable: Mapping[str, int],
    present: str | None,
    *,
    max_gpus: int | None = None,
    memory_bytes: Mapping[str, int] = MappingProxyType({}),
) -> str | None:
    """The type of the GPUs that a job may have if it may not mix; None: there are none.

    Args:
        usable: GPUs that the job could have, those that it has included, by type; an empty name is a type, too.
        present: the type that it has; None: it has none.
        max_gpus: the most that the job uses; None: all.
        memory_bytes: of a GPU, by type, where it is known. Of equally many, the job gets the larger ones, and it never
            goes to smaller ones.
    """
    counts = {gpu_type: min(count, max_gpus or count) for gpu_type, count in usable.items() if count}
    if not counts:
        return None
    best = max(sorted(counts), key=lambda gpu_type: (counts[gpu_type], memory_bytes.get(gpu_type, 0)))
    if present is None or present not in counts:
        return best
    is_smaller = memory_bytes.get(best, 0) < memory_bytes.get(present, 0)  # what it has trained may not fit there
    return present if is_smaller or counts[best] < OTHER_TYPE_FACTOR * counts[present] else best
