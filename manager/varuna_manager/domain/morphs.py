"""What a job's past says about its next morph: what one costs, and how long the shape after it will last."""

from __future__ import annotations

import math
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
    """Without progress until its first step began, waiting for VMs left out; None: it never completed one, or was the
    job's first."""
    save_s: float | None = None
    """What its slowest rank took to save and leave, as its agent timed it; None: it was not told so, or did not."""


@dataclass(frozen=True, kw_only=True)
class Morphs:
    cost_s: float = 10.0
    """Without progress, at a morph; the default is for a job that has not morphed yet."""
    lifetime_s: float = 600.0
    """Of a shape."""
    measured: bool = False
    """Whether the cost is."""
    save_s: float = 1.0
    """To finish a step, save and leave: the longest of the recent ones; the default is for a job that never did."""

    def worthwhile_ratio(self, least: float, stable_s: float = 0.0) -> float:
        """The rate of another shape, in units of the present one's, from which on it pays to change to it.

        A fleet that has been stable for longer than shapes use to last may be expected to stay so for as long again.
        """
        return max(least, 1.0 + _TO_BE_GAINED * self.cost_s / max(self.lifetime_s, stable_step(stable_s)))


def stable_step(stable_s: float) -> float:
    """`stable_s` in steps of two: a reason that tells of it must not be a new one with every look."""
    return 0.0 if stable_s < _SHORTEST_S else 2.0 ** math.floor(math.log2(stable_s / _SHORTEST_S)) * _SHORTEST_S


def look_back(recent: Sequence[PastShape]) -> Morphs:
    """`recent`: the last RECENT shapes, in any order."""
    costs = [shape.morph_s for shape in recent if shape.morph_s is not None]
    saves = [shape.save_s for shape in recent if shape.save_s is not None]
    known = Morphs()
    return Morphs(
        cost_s=median(costs) if costs else known.cost_s,
        lifetime_s=(
            max(_SHORTEST_S, median(shape.lifetime_s for shape in recent))
            if len(recent) >= _FEWEST
            else known.lifetime_s
        ),
        measured=bool(costs),
        save_s=max(saves, default=known.save_s),
    )
