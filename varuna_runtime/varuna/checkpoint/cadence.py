"""When to take the next automatic checkpoint. Pure: no clock, no state.

Frequent checkpoints lose less work when a VM goes. They cost the snapshot's stall and the machine time of writing in
the background: both are measured, and bounded as shares of the time. Within the bounds, a save is taken when it may.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cadence", "next_save_due"]


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """What automatic checkpoints may cost."""

    stall_share: float = 0.01
    """The share of time that training may stand still for snapshots."""
    write_share: float = 0.25
    """The share of time that the background write may run: it competes for cores, disk and network."""
    min_interval_s: float = 1.0
    """Seconds between the starts of two saves at least, however cheap they are."""

    def __post_init__(self) -> None:
        for name in ("stall_share", "write_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: it is a share of the time, above 0 and at most 1")
        if self.min_interval_s < 0:
            raise ValueError(f"min_interval_s {self.min_interval_s}: it cannot be negative")

    def interval_s(self, last_stall_s: float | None, last_write_s: float | None) -> float:
        """Seconds from the start of a save to the start of the next, given what the newest one cost (None: unknown)."""
        return max(
            self.min_interval_s,
            (last_stall_s or 0.0) / self.stall_share,
            (last_write_s or 0.0) / self.write_share,
        )


def next_save_due(
    now_s: float,
    *,
    last_save_s: float,
    last_stall_s: float | None,
    last_write_s: float | None,
    in_flight: bool,
    cadence: Cadence | None = None,
) -> tuple[bool, str]:
    """Whether to save at this step boundary, and why (or why not).

    `last_save_s` is when the newest save started, or when training did; all times are of one clock, in seconds.
    """
    if in_flight:
        return False, "the newest save is still being written"
    interval_s = (cadence or Cadence()).interval_s(last_stall_s, last_write_s)
    since_s = now_s - last_save_s
    if since_s < interval_s:
        return False, f"{since_s:.2f} s since the newest save, due after {interval_s:.2f} s"
    return True, f"{since_s:.2f} s since the newest save, due after {interval_s:.2f} s"
