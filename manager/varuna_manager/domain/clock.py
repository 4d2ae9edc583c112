"""Waits by the wall clock, which may be set while they last.

Silence, progress and quarantine are measured with the monotonic clock where they are observed. Short waits count from a
moment that is in the store. When the clock is set forward, they end early. When it is set back, that moment lies in the
future, and the wait must not last until then.
"""

from __future__ import annotations


def is_within(now: float, since: float, seconds: float) -> bool:
    """Whether fewer than `seconds` have passed since then. A moment in the future counts as long past."""
    return since <= now < since + seconds
