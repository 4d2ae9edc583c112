"""The connections of the tests' own HTTP clients."""

from __future__ import annotations

import httpx

__all__ = ["ONE_CALL_EACH"]

ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)
"""A new connection for each call. The manager closes one that is idle for 5 s, and a test that stands still between
choosing a connection and sending on it would get no answer."""
