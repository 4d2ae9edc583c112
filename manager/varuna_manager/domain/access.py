"""Who may do what: roles, and whoever makes a call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Each may do all that those before it may."""

    VIEWER = "viewer"
    """Reads."""
    USER = "user"
    """Submits and cancels jobs."""
    ADMIN = "admin"
    """Changes the fleet, makes tokens, reads the audit record."""

    def covers(self, needed: Role) -> bool:
        order = tuple(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class Principal:
    """Whoever makes a call: the bearer of a token."""

    name: str
    role: Role
    token_id: str | None = None
    """None: nobody is asked for a token here (an open manager on a loopback address)."""


OPEN = Principal("local", Role.ADMIN)
"""Everybody, at a manager that asks for no tokens."""
