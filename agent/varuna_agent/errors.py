"""What ends the agent before it has begun."""

from __future__ import annotations


class JoinError(Exception):
    """This VM cannot become one of the manager's; `str()` is one line with the way out."""


class CopiesError(Exception):
    """The folder for copies of checkpoints is not this agent's; `str()` is one line with the way out."""
