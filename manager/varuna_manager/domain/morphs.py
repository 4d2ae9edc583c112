"""What a job's next morph will cost, and how long the shape after it will last, estimated from its past."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RECENT = 5
"""Morphs that count: what they cost changes with shape and fleet."""
LOOKED_BACK = 20
"""Shapes among which they are found, because generations in place do not count."""
_FEWEST = 3
"""Lifetimes that are needed to estimate how long shapes last."""
_SHORTEST_S = 60.0
"""A fleet that changes faster than this is growing or being replaced, and about to settle."""
_TO_BE_GAINED = 0.5
"""The fraction of the cost that a morph must gain over a usual lifetime. Found by replaying a spot trace
(docs/planner.md): with more, jobs leave new VMs idle; with less, they morph for nothing."""


@dataclass(frozen=True, kw_only=True)
class PastShape:
    """A training generation that has ended."""

    lifetime_s: float
    morph_s: float | None
    """Time without progress until its first step began, without waits for VMs; None: it completed no step, or was the
    job's first."""
    save_s: float | None = None
    """Time that its slowest rank took to save and leave, by its agent; None: it did not save when it left."""
    in_place: bool = False
    """Whether it went on with the survivors of the one before. That cost less than a restart does."""


@dataclass(frozen=True, kw_only=True)
class MorphEstimate:
    cost_s: float = 10.0
    """Time without progress at a restart. The default is for a job that has not morphed yet."""
    lifetime_s: float = 600.0
    """How long a shape lasts."""
    measured: bool = False
    """Whether the cost is measured."""
    save_s: float = 1.0
    """The longest recent time to finish a step, save and leave. The default is for a job that never did."""

    def worthwhile_ratio(self, least: float, stable_s: float = 0.0) -> float:
        """The least rate of another shape, in units of the present rate, that is worth a morph.

        A fleet that has been stable for longer than shapes usually last is expected to stay so for as long again.
        """
        return max(least, 1.0 + _TO_BE_GAINED * self.cost_s / max(self.lifetime_s, round_stable_s(stable_s)))


def round_stable_s(stable_s: float) -> float:
    """`stable_s`, rounded down to powers of two, so that a reason with it does not change at every look."""
    return 0.0 if stable_s < _SHORTEST_S else 2.0 ** math.floor(math.log2(stable_s / _SHORTEST_S)) * _SHORTEST_S


def estimate_morphs(recent: Sequence[PastShape]) -> MorphEstimate:
    """`recent`: the last LOOKED_BACK shapes, newest first."""
    restarts = [shape for shape in recent if not shape.in_place][:RECENT]
    costs = [shape.morph_s for shape in restarts if shape.morph_s is not None]
    recent = recent[:RECENT]
    saves = [shape.save_s for shape in recent if shape.save_s is not None]
    known = MorphEstimate()
    return MorphEstimate(
        cost_s=median(costs) if costs else known.cost_s,
        lifetime_s=(
            max(_SHORTEST_S, median(shape.lifetime_s for shape in recent))
            if len(recent) >= _FEWEST
            else known.lifetime_s
        ),
        measured=bool(costs),
        save_s=max(saves, default=known.save_s),
    )
