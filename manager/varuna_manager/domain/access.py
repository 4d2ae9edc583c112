"""Roles, and the principals that make calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BY_MANAGER = "the manager"
"""Who made a token that nobody asked for, such as one with which the agent of a new VM joins."""


class Role(StrEnum):
    """Each role includes the ones before it."""

    VIEWER = "viewer"
    """May read."""
    USER = "user"
    """May also submit and cancel jobs."""
    ADMIN = "admin"
    """May also change the fleet, make tokens, and read the audit log."""

    def is_at_least(self, needed: Role) -> bool:
        order = tuple(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class Principal:
    """The caller: the bearer of a token."""

    name: str
    role: Role
    token_id: str | None = None
    """None: the manager needs no tokens, because it is open on a loopback address."""


OPEN_PRINCIPAL = Principal("local", Role.ADMIN)
"""Every caller of a manager that needs no tokens."""
