"""How often a job saves: what a save costs against the work that it protects. The runtime decides by it when to save,
and the manager by how much copies in other VMs' memories would spare. Pure, and without numpy, because the manager's
loop calls it.

With frequent checkpoints, less work is lost with a VM. They cost the stall of the snapshot and the machine time of the
background write: both are bounded as shares of the time. Within the bounds, saves come as often as they can. Where VMs
are lost so often that saving more pays (`best_checkpoints`), the stall's bound is wider (`Cadence`).

Letters: s seconds per mini-batch, k mini-batches between saves, q the share of removals with notice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

__all__ = ["Cadence", "CheckpointInterval", "StopCosts", "best_checkpoints", "check_rate"]

LONGEST_INTERVAL_S: Final = 3600.0
"""The most between saves: hazards are estimates, and there are other faults, too."""


_ROUNDING: Final = 1e-12
"""Shares that differ by less do so by rounding."""


@dataclass(frozen=True, kw_only=True)
class StopCosts:
    """What stops and saves cost, measured or estimated."""

    morph_s: float = 30.0
    """From the stop of a generation to the first mini-batch of the next: plan, launch, load."""
    replace_s: float | None = None
    """The same when a warm spare replaces the lost VM and the plan stays; None: morph_s."""
    detect_s: float = 3.0
    """The time until a loss without notice is detected."""
    save_stall_s: float = 0.5
    """How long training stands still for each save (the copy)."""
    save_write_s: float = 5.0
    """From the copy until the checkpoint is complete, in the background; one save at a time."""
    notice_probability: float = 0.0
    """q: removals announced early enough to end the mini-batch and save."""

    def __post_init__(self) -> None:
        for name in ("morph_s", "detect_s", "save_stall_s", "save_write_s"):
            check_rate(name, getattr(self, name))
        check_rate("replace_s", self.replace_s or 0.0)
        if not 0 <= self.notice_probability <= 1:
            raise ValueError(f"notice_probability is {self.notice_probability}: it must be 0 to 1")

    @property
    def save_s(self) -> float:
        """The time of a save that training waits for."""
        return self.save_stall_s + self.save_write_s

    @property
    def before_morph_s(self) -> float:
        """Mean time from a loss until the morph can begin."""
        q = self.notice_probability
        return (1 - q) * self.detect_s + q * self.save_s


def check_rate(name: str, value: float) -> None:
    """Raises ValueError when it is no rate, time or share of one."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}: it must be finite and not negative")


@dataclass(frozen=True, kw_only=True)
class CheckpointInterval:
    """How often to save, and the resulting shares of the time."""

    every: int
    """k: mini-batches between saves."""
    interval_s: float
    """k times s: seconds of training between saves."""
    running: float
    """The share of the time since the launch that is spent training instead of saving."""
    redone_s: float
    """Training that a stop loses and that is repeated: the mean over stops with and without notice."""
    kept: float
    """The share of the time since the launch whose work is never lost: the interval maximises it."""


def best_checkpoints(stops_per_s: float, minibatch_s: float, costs: StopCosts) -> CheckpointInterval:
    """The number of mini-batches between saves that keeps the most work, when stops are a Poisson process.

    If stalls and intervals are short compared with the time between stops, this is Young's sqrt(2 · stall / rate).
    In addition, mini-batches are indivisible, a save counts only once it is written, and a notice saves all work.

    Raises ValueError when a rate or time is negative, or the mini-batch takes no time.
    """
    check_rate("stops_per_s", stops_per_s)
    if not (math.isfinite(minibatch_s) and minibatch_s > 0):
        raise ValueError(f"minibatch_s is {minibatch_s}: it must be finite and above 0")
    low = max(1, math.ceil((costs.save_write_s - costs.save_stall_s) / minibatch_s))
    high = max(low, math.floor(LONGEST_INTERVAL_S / minibatch_s))
    while high - low > 2:  # the kept share rises up to the best k and then falls, at last by less than it is rounded
        left = low + (high - low) // 3
        right = high - (high - low) // 3
        gain = (
            _checkpoints(right, stops_per_s, minibatch_s, costs).kept
            - _checkpoints(left, stops_per_s, minibatch_s, costs).kept
        )
        if gain > _ROUNDING:
            low = left + 1
        else:
            high = right
    tried = [_checkpoints(every, stops_per_s, minibatch_s, costs) for every in range(low, high + 1)]
    return max(tried, key=lambda checkpoints: checkpoints.kept)


def _checkpoints(k: int, rate: float, s: float, costs: StopCosts) -> CheckpointInterval:
    """In closed form. With X ~ Exp(rate) from the first mini-batch to the stop, and the period T = k·s + stall:

    - trained until X: E = Σ_{i≥0} ∫_0^{k·s} e^(-rate·(i·T + t)) dt
    - saved by X: save i holds i·k·s from i·T + write on; E = k·s Σ_{i≥1} e^(-rate·(i·T + write)).

    Without notice the difference is lost, with the current mini-batch; with notice nothing is.
    """
    interval = k * s
    period = interval + costs.save_stall_s
    if rate * period < 1e-9:  # the limit
        running = interval / period
        redone = (1 - costs.notice_probability) * running * (interval / 2 + costs.save_stall_s + costs.save_write_s)
    else:
        periods = -1 / math.expm1(-rate * period)
        trained = -math.expm1(-rate * interval) / rate * periods
        saved = interval * math.exp(-rate * (period + costs.save_write_s)) * periods
        running = rate * trained
        redone = (1 - costs.notice_probability) * (trained - saved)
    return CheckpointInterval(
        every=k, interval_s=interval, running=running, redone_s=redone, kept=running - rate * redone
    )


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """What automatic checkpoints may cost, and what they are worth."""

    stall_share: float = 0.01
    """The share of time that training may stand still for snapshots, whatever they are worth."""
    worth_stall_share: float = 0.05
    """The same share where the hazard makes more frequent saves pay."""
    write_share: float = 0.25
    """The share of time that the background write may run: it competes for cores, disk and network."""
    min_interval_s: float = 1.0
    """Seconds between the starts of two saves at least, however cheap they are."""
    stops_per_hour: float = 0.0
    """How often lost VMs are expected to send the job back to its checkpoint; 0: unknown."""
    uncopied_stops_per_hour: float = 0.0
    """The same as long as other VMs have no whole copies of the state; less than `stops_per_hour`: as that."""
    pinned_interval_s: float | None = None
    """The interval that the user sets; then nothing else counts."""

    def __post_init__(self) -> None:
        for name in ("stall_share", "worth_stall_share", "write_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: it is a share of the time, above 0 and at most 1")
        for name in ("min_interval_s", "stops_per_hour", "uncopied_stops_per_hour"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: it cannot be negative")
        if self.pinned_interval_s is not None and not self.pinned_interval_s > 0:
            raise ValueError(f"pinned_interval_s {self.pinned_interval_s}: it must be above 0, or None to leave it")

    def without_copies(self) -> Cadence:
        """The cadence as long as other VMs have no whole copies of the state."""
        return replace(self, stops_per_hour=max(self.stops_per_hour, self.uncopied_stops_per_hour))

    def interval_s(
        self, last_stall_s: float | None, last_write_s: float | None, minibatch_s: float | None = None
    ) -> float:
        """Seconds from the start of a save to the start of the next, given what the newest one cost (None: unknown).

        `minibatch_s`: the time of a step; without it the hazard does not count.
        """
        if self.pinned_interval_s is not None:
            return self.pinned_interval_s
        stall_s, write_s = last_stall_s or 0.0, last_write_s or 0.0
        least_s = max(self.min_interval_s, write_s / self.write_share)
        usual_s = max(least_s, stall_s / self.stall_share)
        if not (self.stops_per_hour > 0 and minibatch_s):
            return usual_s
        best_s = _best_interval_s(self.stops_per_hour, *map(_rounded, (minibatch_s, stall_s, write_s)))
        return min(usual_s, max(least_s, stall_s / self.worth_stall_share, best_s))


@lru_cache(maxsize=16)  # called at every step; the arguments change only at a save
def _best_interval_s(stops_per_hour: float, minibatch_s: float, stall_s: float, write_s: float) -> float:
    """Seconds from the start of a save to the next, by the cost of a save and the work that it protects.

    Half a mini-batch is subtracted, so that the intended boundary is not missed by a moment.
    """
    costs = StopCosts(save_stall_s=stall_s, save_write_s=write_s)
    return stall_s + best_checkpoints(stops_per_hour / 3600, minibatch_s, costs).interval_s - minibatch_s / 2


def _rounded(value: float) -> float:
    """To two digits, because no measurement here is more exact."""
    return float(f"{value:.2g}")
