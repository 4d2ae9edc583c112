"""What manager and agent both ask of an address."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether it names this machine to itself: `localhost`, or a loopback address (IPv6 without brackets)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
