"""When to take the next automatic checkpoint, by the measured cost of the newest. Pure: no clock, no state."""

from __future__ import annotations

from varuna_planner.liveput.checkpoint_interval import Cadence

__all__ = ["decide_save"]


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
