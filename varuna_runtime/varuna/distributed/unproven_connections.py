"""Connections to a server of rank 0 whose other ends have not proved yet that they belong to the generation."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

__all__ = ["UnprovenConnections"]

_ACCEPT_AGAIN_S = 0.02


class UnprovenConnections:
    """The unproven connections of one listener, at most `most`: one more ends the oldest, so that strangers who stay
    silent keep no rank out."""

    def __init__(self, listener: socket.socket, most: int, close: Callable[[socket.socket], None]) -> None:
        """`close` ends a connection and calls `discard_connection`."""
        self._listener = listener
        self._most = most
        self._close = close
        self._connections: dict[socket.socket, None] = {}
        """The oldest first."""

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def accept_connection(self) -> tuple[socket.socket, str] | None:
        """The next connection, which does not block, and its address; None when there is none after all."""
        try:
            connection, address = self._listener.accept()
        except OSError:  # it has gone again, or this process has no more file descriptors
            time.sleep(_ACCEPT_AGAIN_S)
            return None
        if len(self._connections) >= self._most:
            self._close(next(iter(self._connections)))
        connection.setblocking(False)
        self._connections[connection] = None
        return connection, str(address[0])

    def discard_connection(self, connection: socket.socket) -> None:
        """Forgets a connection whose other end has proved itself, or that has ended."""
        self._connections.pop(connection, None)
