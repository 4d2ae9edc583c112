"""Where this machine's browser is, for the tests that look at the dashboard."""

from __future__ import annotations

import shutil

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The path of Chromium or Chrome; None: there is none."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)
