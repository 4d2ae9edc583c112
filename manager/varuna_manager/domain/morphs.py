"""What a job's past says about its next morph: what one costs, and how long the shape after it will last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RECENT = 5
"""Morphs that are looked back on: what they cost changes with shape and fleet."""
_FEWEST = 3
"""Lifetimes without which nothing is known of how long shapes last."""
_SHORTEST_S = 60.0
"""A fleet that changes faster than this is growing or being replaced, and about to settle."""
_TO_BE_GAINED = 0.5
"""Of the cost, over a usual lifetime. Found by replaying a spot trace (docs/planner.md): with more, jobs leave new VMs
idle; with less, they morph for nothing."""


@dataclass(frozen=True, kw_only=True)
class PastShape:
    """A training generation that has ended."""

    lifetime_s: float
    morph_s: float | None
    """Without progress until its first step began; None: it never completed one, or was the job's first."""


@dataclass(frozen=True, kw_only=True)
class Morphs:
    cost_s: float = 10.0
    """Without progress, at a morph; the default is for a job that has not morphed yet."""
    lifetime_s: float = 600.0
    """Of a shape."""

    def worthwhile_ratio(self, least: float) -> float:
        """The rate of another shape, in units of the present one's, from which on it pays to change to it."""
        return max(least, 1.0 + _TO_BE_GAINED * self.cost_s / self.lifetime_s)


def look_back(recent: Sequence[PastShape]) -> Morphs:
    """`recent`: the last RECENT shapes, in any order."""
    costs = [shape.morph_s for shape in recent if shape.morph_s is not None]
    known = Morphs()
    return Morphs(
        cost_s=median(costs) if costs else known.cost_s,
        lifetime_s=(
            max(_SHORTEST_S, median(shape.lifetime_s for shape in recent))
            if len(recent) >= _FEWEST
            else known.lifetime_s
        ),
    )
