"""What a job's next morph will cost, learned from its own past and from the fleet's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from varuna_planner.liveput.morph_cost import PRIOR_FIXED_S, MorphKind

RECENT = 5
"""Morphs of the job that count: what they cost changes with shape and fleet."""
FLEET_RECENT = 20
"""Morphs of all jobs that count where the job has none of its own."""
LOOKED_BACK = 20
"""Shapes among which they are found, because morphs of another kind do not count."""


@dataclass(frozen=True, kw_only=True)
class PastShape:
    """A training generation that has ended."""

    ended_at: float = 0.0
    morph_s: float | None = None
    """The pause until its first step began, without waits for VMs; None: it completed no step, or was the job's
    first."""
    moving_s: float = 0.0
    """The part of that in which state moved, at the rate of an ordinary network."""
    save_s: float | None = None
    """Time that its slowest rank took to save and leave, by its agent; None: it did not save when it left."""
    in_place: bool = False
    """Whether it went on with the survivors of the one before. That cost less than a restart does."""


@dataclass(frozen=True, kw_only=True)
class MorphEstimate:
    cost_s: float = PRIOR_FIXED_S[MorphKind.FROM_MEMORY]
    """The pause at a restart, without that for moving the state (`Proposal.moving_s`)."""
    in_place_s: float = PRIOR_FIXED_S[MorphKind.IN_PLACE]
    """The pause where survivors go on in place."""
    measured: bool = False
    """Whether `cost_s` is measured, on this job or on another."""
    save_s: float = 1.0
    """The longest recent time to finish a step, save and leave. The default is for a job that never did."""


_PRIOR = MorphEstimate()


def estimate_morphs(recent: Sequence[PastShape], fleet: MorphEstimate = _PRIOR) -> MorphEstimate:
    """`recent`: the job's last LOOKED_BACK shapes, newest first; `fleet`: what other jobs' morphs cost."""
    restarts, in_place = (_list_pauses(recent, in_place=kind)[:RECENT] for kind in (False, True))
    saves = [shape.save_s for shape in recent[:RECENT] if shape.save_s is not None]
    return MorphEstimate(
        cost_s=median(restarts) if restarts else fleet.cost_s,
        in_place_s=median(in_place) if in_place else fleet.in_place_s,
        measured=bool(restarts) or fleet.measured,
        save_s=max(saves, default=fleet.save_s),
    )


def estimate_fleet_morphs(shapes: Sequence[PastShape]) -> MorphEstimate:
    """What morphs cost by the newest of all jobs. How long saves take depends on the job, so that is not in it."""
    newest = sorted(shapes, key=lambda shape: -shape.ended_at)
    restarts, in_place = (_list_pauses(newest, in_place=kind)[:FLEET_RECENT] for kind in (False, True))
    return MorphEstimate(
        cost_s=median(restarts) if restarts else _PRIOR.cost_s,
        in_place_s=median(in_place) if in_place else _PRIOR.in_place_s,
        measured=bool(restarts),
    )


def _list_pauses(shapes: Sequence[PastShape], *, in_place: bool) -> list[float]:
    return [
        max(0.0, shape.morph_s - shape.moving_s)
        for shape in shapes
        if shape.in_place is in_place and shape.morph_s is not None
    ]
