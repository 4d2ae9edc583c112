"""Ports held for the ranks 0 on this VM: MASTER_PORT, on which a script's own init_process_group may listen.

A port number that is only written down may be taken by the time rank 0 listens on it. So the agent keeps a bound socket
until the worker has ended. Varuna itself does not listen there: its port follows from the generation's secret
(`varuna.distributed.handshake`).
"""

from __future__ import annotations

import socket

from varuna_agent.state import WorkerKey
from varuna_proto.held_port import hold_port


class RendezvousPorts:
    """One port is held for the next rank 0, and one for each rank 0 that waits or runs."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._next: socket.socket | None = None
        self._claimed: dict[int, socket.socket] = {}
        self._port_of: dict[WorkerKey, int] = {}

    def open_port(self) -> int:
        """Bind a port that is free on all addresses and hold it; returns its number.

        Raises OSError when the host is not one of this VM's.
        """
        try:
            held = hold_port(self._host)
        except OSError as error:
            raise OSError(f"cannot bind a port on {self._host}: {error}; is it an address of this VM?") from error
        self._next = held
        port: int = held.getsockname()[1]
        return port

    def claim_port(self, port: int) -> None:
        """Set the port aside that is held for the next rank 0."""
        assert self._next is not None, "claimed twice"
        assert self._next.getsockname()[1] == port
        self._claimed[port] = self._next
        self._next = None

    def assign_port(self, port: int, key: WorkerKey) -> None:
        """The claimed port is this worker's, until `release_worker`."""
        self._port_of[key] = port

    def release_port(self, port: int) -> None:
        """The worker that the port was claimed for does not start, or has left its generation."""
        self._claimed.pop(port).close()
        self._port_of = {key: own for key, own in self._port_of.items() if own != port}

    def release_worker(self, key: WorkerKey) -> None:
        """The worker has ended. Does nothing for one that has no port."""
        if key in self._port_of:
            self.release_port(self._port_of[key])

    def close(self) -> None:
        for held in (*self._claimed.values(), *([self._next] if self._next else [])):
            held.close()
        self._claimed.clear()
        self._port_of.clear()
        self._next = None
