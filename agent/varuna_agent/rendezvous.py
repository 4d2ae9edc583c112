"""Bound sockets for coming generations: MASTER_PORT, on which a script's own init_process_group may listen.

A port number that is only written down may be taken by the time rank 0 listens on it. So the agent keeps the socket and
hands it over to rank 0. Varuna itself does not listen there: its port follows from the generation's secret
(`varuna.handshake`).
"""

from __future__ import annotations

import socket

from varuna_proto.held_port import hold_port


class RendezvousSockets:
    """One socket is held for the next rank 0; claimed ones wait for theirs to start."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: socket.socket | None = None
        self._claimed: dict[int, socket.socket] = {}

    def open(self) -> int:
        """Bind a port that is free on all addresses and hold it; returns its number.

        Raises OSError when the host is not one of this VM's.
        """
        try:
            held = hold_port(self._host)
        except OSError as error:
            raise OSError(f"cannot bind a port on {self._host}: {error}; is it an address of this VM?") from error
        self._held = held
        port: int = held.getsockname()[1]
        return port

    def claim(self, port: int) -> None:
        """Set the held socket aside."""
        assert self._held is not None, "claimed twice"
        assert self._held.getsockname()[1] == port
        self._claimed[port] = self._held
        self._held = None

    def take(self, port: int) -> socket.socket:
        """The claimed socket, from now on the caller's."""
        return self._claimed.pop(port)

    def release(self, port: int) -> None:
        self._claimed.pop(port).close()

    def close(self) -> None:
        for held in (*self._claimed.values(), *([self._held] if self._held else [])):
            held.close()
        self._claimed.clear()
        self._held = None
