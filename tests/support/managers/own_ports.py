"""Ports that a test may name before it listens on them, and listen on again later."""

from __future__ import annotations

import random
import socket

_PORTS = range(11_000, 20_000)
"""None that Linux gives to a connection or to who asks for any port, or that a browser refuses."""
_CHANCE = random.SystemRandom()  # a seeded one would draw the same in every process


def own_ports(count: int) -> list[int]:
    """Ports of loopback on which nobody listens."""
    found: list[int] = []
    while len(found) < count:
        port = _CHANCE.choice(_PORTS)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
