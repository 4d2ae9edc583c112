"""What a job learns when a device has no memory left: how large its devices are, and by how much its stages need more
than its profile says.

The planner then sees devices that are smaller by this factor, on which the plan that failed does not fit. So the next
one is more careful: it has more stages, smaller micro-batches, less run-ahead, or recomputes. And as there are few
lessons, a job does not go on like that for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from varuna_proto.wording import render_bytes

if TYPE_CHECKING:
    from varuna_manager.domain.observed import GenerationView

MOST_LESSONS = 8
"""A job that runs out of memory more often than this fails."""
_LEAST_GROWTH = 1.1


@dataclass(frozen=True, kw_only=True)
class MemoryShortage:
    """What a device had when a worker asked it for memory in vain."""

    asked_bytes: int = 0
    """0: not known."""
    free_bytes: int = 0
    limit_bytes: int = 0
    """All memory of the device."""
    peak_bytes: int = 0
    """The most that tensors of the worker have had."""

    @property
    def needed_bytes(self) -> int:
        """The least that the worker needed: more than there is."""
        return max(self.limit_bytes - self.free_bytes + self.asked_bytes, self.limit_bytes)

    def render(self) -> str:
        there = f"of {render_bytes(self.limit_bytes)} on its device {render_bytes(self.free_bytes)} were free"
        asked = f"when it asked for {render_bytes(self.asked_bytes)}" if self.asked_bytes else "when it asked for more"
        return f"{there} {asked}"

    def to_document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class MemoryMargin:
    """How a job's plans allow for more than its profile says."""

    factor: float = 1.0
    """What a stage needs, in terms of what the profile says."""
    device_bytes: int | None = None
    """Memory of the smallest device that had too little; None: none had."""
    lessons: int = 0
    """How often it has grown since the job was submitted or retried."""

    @classmethod
    def from_document(cls, document: Mapping[str, Any] | None) -> MemoryMargin:
        return cls(**document) if document else NO_MARGIN

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    def limit_device(self, device_bytes: int | None) -> int | None:
        """The memory of a device with so much, as a plan by the profile may count on it; None: not limited."""
        known = [bytes_ for bytes_ in (device_bytes, self.device_bytes) if bytes_ is not None]
        return int(min(known) / self.factor) if known else None


NO_MARGIN = MemoryMargin()


@dataclass(frozen=True, kw_only=True)
class MemoryLesson:
    """What one end of a generation for want of memory teaches."""

    rank: int
    stage: int
    shortage: MemoryShortage
    planned_bytes: int
    """Of the stage, by the profile; 0: not known."""
    margin: MemoryMargin
    """From now on."""

    @property
    def shortfall_bytes(self) -> int:
        """By how much the stage needed more than planned, at least."""
        return max(self.shortage.needed_bytes - self.planned_bytes, 0)

    @property
    def was_too_large(self) -> bool:
        """Whether the plan counted on a larger device. Then the profile may be right."""
        return self.planned_bytes > self.shortage.limit_bytes > 0

    def render(self, p: int) -> str:
        stage = f"stage {self.stage + 1} of {p}"
        if self.was_too_large:
            return (
                f"{stage} was planned with {render_bytes(self.planned_bytes)}, because nobody knew how little memory "
                "its device has"
            )
        planned = f" where {render_bytes(self.planned_bytes)} were planned" if self.planned_bytes else ""
        return (
            f"{stage} needs at least {render_bytes(self.shortage.needed_bytes)}{planned}: stages count "
            f"{self.margin.factor:.2f} times what the profile says from now on"
        )


def learn_margin(generation: GenerationView, before: MemoryMargin) -> MemoryLesson | None:
    """What the ranks of an ended generation teach that had no memory left; None: nothing.

    Where processes were to go on in place, what they still held may have been the reason: new ones have all memory.
    """
    plan = generation.plan
    short = [(worker, worker.shortage) for worker in generation.workers if worker.shortage is not None]
    if plan is None or not short or (generation.in_place and generation.last_step is None):
        return None

    def count_planned(rank: int) -> int:
        return plan.memory_bytes[rank % plan.p] if plan.memory_bytes else 0

    def grown(rank: int, shortage: MemoryShortage) -> float:
        planned = count_planned(rank)
        if planned > shortage.limit_bytes > 0:
            return before.factor
        return max(before.factor * _LEAST_GROWTH, shortage.needed_bytes / planned if planned else 0.0)

    worker, shortage = max(short, key=lambda one: (grown(one[0].rank, one[1]), -one[0].rank))
    limits = [one.limit_bytes for _, one in short if one.limit_bytes]
    known = [*limits, *([before.device_bytes] if before.device_bytes is not None else [])]
    return MemoryLesson(
        rank=worker.rank,
        stage=worker.rank % plan.p,
        shortage=shortage,
        planned_bytes=count_planned(worker.rank),
        margin=MemoryMargin(
            factor=grown(worker.rank, shortage),
            device_bytes=min(known, default=None),
            lessons=before.lessons + 1,
        ),
    )
