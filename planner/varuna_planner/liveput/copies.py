"""Whether copies in other VMs' memories are worth the time that they take: those of states, which spare a job its
checkpoint, and those of the sums of long steps (marks), which spare it what is done of a step.

What losses cost is reckoned to the first order, as if each came alone: their rate times the training that one of them
throws away. Imports next to nothing, because the manager's loop calls it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from varuna_planner.liveput.checkpoint_interval import Cadence
from varuna_planner.liveput.morph_cost import MARKS_S, SUMS_PART

__all__ = [
    "MARKS_SHARE",
    "NOTHING",
    "SENDING_SHARE",
    "CopiedParts",
    "LossExposure",
    "choose_copies",
    "predict_copying_share",
    "predict_stall_s",
]

SENDING_SHARE: Final = 0.02
"""Of the time in which copies are sent, what they take of training. Measured on processors that train at the same time,
where they are sent all the time, as slowly as training hardly feels it: steps are 2 % longer (95 % interval 1.012 to
1.029) at 22 MB, and 1.8 % (0.991 to 1.053) at 200 MB; docs/benchmarks.md. Assumed for GPUs, whose processors are idle,
so that copies go at the links' speed."""
MARKS_SHARE: Final = 0.01
"""Of the time, the most that training waits for copies of sums. Where these take longer, there are fewer marks
(`varuna.copies.rank_shares`)."""
_ROUNDS_BEHIND: Final = 1.5
"""By how many rounds of copies a job goes back on average, where a round takes longer than a step: one to two."""
_HOUR_S: Final = 3600.0
_MISSED_SAVES: Final = 3
"""A job that trains for so many times that between two saves, and no checkpoint comes, is taken as one without a
store."""
_SHORTEST_PROOF_S: Final = 1800.0
"""For less time than this, it is not: what a save takes is only predicted, and a slow store makes saves rare."""


class CopiedParts(NamedTuple):
    """What the VMs of a generation copy to each other."""

    states: bool = False
    marks: bool = False

    @property
    def name(self) -> str:
        names = ["copies of states"] * self.states + ["marks"] * self.marks
        return " and ".join(names) or "no copies"


NOTHING: Final = CopiedParts()


def predict_copying_share(kept: CopiedParts, *, step_s: float, send_s: float, beside_passes: bool) -> float:
    """Of the time, what the copies take of training.

    Args:
        send_s: how long a stage's state is sent over its VM's link.
        beside_passes: whether they are copied while passes run, as on an accelerator.
    """
    if not beside_passes:
        return SENDING_SHARE * kept.states + MARKS_SHARE * kept.marks
    states = kept.states * min(1.0, send_s / step_s)
    marks = kept.marks * min(1.0, SUMS_PART * send_s / MARKS_S)
    return SENDING_SHARE * (states + marks)


def predict_stall_s(copy_s: float, *, step_s: float, beside_passes: bool) -> float:
    """How long training stands still for a save whose state is copied in `copy_s`. `beside_passes`: as above."""
    return 0.0 if beside_passes and step_s > copy_s else copy_s


@dataclass(frozen=True, kw_only=True)
class LossExposure:
    """What a generation may lose, and how often."""

    losses_per_hour: float
    """VMs that are expected to be lost, of those that it uses."""
    bursts_per_hour: float
    """The same, those counted once that are lost together: each burst stops it once. Here and below only those that
    cost something: not those with a notice in time."""
    hit_share: float
    """The share of its replicas that lose a VM in a burst."""
    store_stops_per_hour: float
    """Bursts after which it needs its checkpoint, without copies of states,"""
    copied_store_stops_per_hour: float
    """and with them."""
    step_s: float
    """Above 0."""
    save_stall_s: float
    """How long the copy of a state takes that is saved."""
    save_write_s: float
    """How long a save is written, as long as a copy of the same state is sent."""
    copies_beside_passes: bool = False
    """Whether states and sums are copied while passes run. If not, training stands still."""
    save_interval_s: float | None = None
    """Between saves, where the user says so; None: as often as pays (`Cadence`)."""
    unsaved_s: float | None = None
    """What a job without new checkpoints has trained since its last one; None: its checkpoints come."""

    def is_overdue(self, trained_s: float) -> bool:
        """Whether a job that has trained so long without a new checkpoint has no store that works."""
        period_s = self._predict_save_period_s(self.store_stops_per_hour) + self.save_write_s
        return trained_s > max(_SHORTEST_PROOF_S, _MISSED_SAVES * period_s)

    def predict_copying_s(self, kept: CopiedParts) -> float:
        """The seconds of an hour that the copies take."""
        return _HOUR_S * predict_copying_share(
            kept, step_s=self.step_s, send_s=self.save_write_s, beside_passes=self.copies_beside_passes
        )

    def predict_lost_s(self, kept: CopiedParts) -> float:
        """The seconds that losses of VMs, saves and the copies themselves cost of an hour."""
        store_stops = self.copied_store_stops_per_hour if kept.states else self.store_stops_per_hour
        period_s = self._predict_save_period_s(store_stops)
        stall_s = predict_stall_s(self.save_stall_s, step_s=self.step_s, beside_passes=self.copies_beside_passes)
        redone_s = period_s / 2 + stall_s + self.save_write_s
        if self.unsaved_s is not None:  # all is done again, with half of the hour on average
            redone_s = self.unsaved_s + _HOUR_S / 2
        saves_s = _HOUR_S * stall_s / period_s
        copied_stops = self.store_stops_per_hour - store_stops
        rounds_s = _ROUNDS_BEHIND * max(0.0, self.save_write_s - self.step_s)
        # Without a mark, half a step's work is lost on average, and with marks half of what is between two of them.
        marks_s = max(MARKS_S, SUMS_PART * self.save_write_s)  # the next one is made when the newest has been sent
        part_s = (min(self.step_s, marks_s) if kept.marks else self.step_s) / 2
        steps_s = (self.bursts_per_hour - store_stops) * self.hit_share * part_s
        return self.predict_copying_s(kept) + saves_s + store_stops * redone_s + copied_stops * rounds_s + steps_s

    def _predict_save_period_s(self, store_stops: float) -> float:
        """Between the starts of two saves, which are at the ends of steps."""
        cadence = Cadence(stops_per_hour=store_stops, pinned_interval_s=self.save_interval_s)
        interval_s = cadence.interval_s(self.save_stall_s, self.save_write_s, self.step_s)
        return self.step_s * max(1, math.ceil(interval_s / self.step_s))


def choose_copies(exposure: LossExposure, possible: Collection[CopiedParts]) -> tuple[CopiedParts, str]:
    """What of the possible is worth copying, and the figures as text. The fewest copies of equals.

    Marks are of no use, and none are made, in steps that are not longer than the time between two of them.
    """
    options = [one for one in sorted(possible) if one != NOTHING and not (one.marks and exposure.step_s <= MARKS_S)]
    if not options:
        return NOTHING, ""
    lost_s = {one: exposure.predict_lost_s(one) for one in (NOTHING, *options)}
    best = min(lost_s, key=lambda one: lost_s[one])
    compared = min(options, key=lambda one: lost_s[one])
    text = (
        f"{best.name} are kept: about {_render(exposure.losses_per_hour)} VMs are lost an hour, which takes "
        f"{_render(lost_s[NOTHING])} s of it, saves included; with {compared.name} it is "
        f"{_render(lost_s[compared])} s, {_render(exposure.predict_copying_s(compared))} s of them for copying"
    )
    if exposure.unsaved_s is not None:
        text += f"; no checkpoint has the last {_render(exposure.unsaved_s)} s of training"
    return best, text


def _render(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
