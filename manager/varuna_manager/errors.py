"""Errors that end the manager's process."""

from __future__ import annotations


class StartError(Exception):
    """The manager cannot start; `str()` is one line with the way out."""
