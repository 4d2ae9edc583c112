"""When to take the next automatic checkpoint. Pure: no clock, no state.

With frequent checkpoints, less work is lost with a VM. They cost the stall of the snapshot and the machine time of the
background write: both are measured, and bounded as shares of the time. Within the bounds, saves come as often as they
can. Where VMs are lost so often that saving more pays (`varuna_planner.liveput`), the stall's bound is
wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from varuna_planner.liveput.liveput import StopCosts, best_checkpoints

__all__ = ["Cadence", "decide_save"]


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
    pinned_interval_s: float | None = None
    """The interval that the user sets; then nothing else counts."""

    def __post_init__(self) -> None:
        for name in ("stall_share", "worth_stall_share", "write_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: it is a share of the time, above 0 and at most 1")
        for name in ("min_interval_s", "stops_per_hour"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: it cannot be negative")
        if self.pinned_interval_s is not None and not self.pinned_interval_s > 0:
            raise ValueError(f"pinned_interval_s {self.pinned_interval_s}: it must be above 0, or None to leave it")

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


def decide_save(
    now_s: float,
    *,
    last_save_s: float,
    last_stall_s: float | None,
    last_write_s: float | None,
    in_flight: bool,
    cadence: Cadence | None = None,
    minibatch_s: float | None = None,
) -> tuple[bool, str]:
    """Whether to save at this step boundary, and why (or why not).

    `last_save_s` is when the newest save started, or when training did; all times are of one clock, in seconds.
    `minibatch_s`: the time of a step, if known.
    """
    if in_flight:
        return False, "the newest save is still being written"
    interval_s = (cadence or Cadence()).interval_s(last_stall_s, last_write_s, minibatch_s)
    since_s = now_s - last_save_s
    if since_s < interval_s:
        return False, f"{since_s:.2f} s since the newest save, due after {interval_s:.2f} s"
    return True, f"{since_s:.2f} s since the newest save, due after {interval_s:.2f} s"
