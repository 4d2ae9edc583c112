"""Waits that are measured with the wall clock, which somebody may set while they last.

What must not be misjudged (silence, progress, quarantine) is measured with the monotonic clock, where it is observed.
Short waits count from a moment that is in the store. When the clock is set forward they are over early; when it is set
back, that moment lies in the future, and a wait must not last until then.
"""

from __future__ import annotations


def is_within(now: float, since: float, seconds: float) -> bool:
    """Whether fewer than `seconds` have passed since then; a moment that is yet to come counts as long past."""
    return since <= now < since + seconds
