"""Sockets that a forked child (a data loader's worker) must not keep: it may outlive its parent.

Python never forgets what is registered for a fork. So there is one function, and it keeps no socket alive.
"""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

__all__ = ["close_in_forked_children"]

_sockets: WeakSet[socket.socket] = WeakSet()


def close_in_forked_children(connection: socket.socket) -> None:
    """Makes every process that is forked from this one close its end of `connection`, or of a listener, at once."""
    _sockets.add(connection)


def _close_sockets() -> None:
    for connection in list(_sockets):
        connection.close()


os.register_at_fork(after_in_child=_close_sockets)
