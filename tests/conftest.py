"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# A busy machine is slow, and no test says anything about time. CI plays the same examples each time; others new ones.
settings.register_profile("varuna", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("varuna")
