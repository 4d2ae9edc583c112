"""Whether this rank reaches the peers that it is about to form a group with; if not, which one it does not.

Two machines may both reach the rest of the fleet but not each other. gloo then waits until its time limit and names no
rank, and so do all ranks that wait for these two. So every rank listens on a port of its own, which it puts into the
store, and the ranks that form a group with it connect there first. A rank that has not started yet has no port in the
store, and the others wait for it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from varuna.diagnostics.error_text import first_line

__all__ = ["ReachablePort", "UnreachedError", "address_towards", "is_loopback", "is_out_of_reach", "try_connect"]

_ATTEMPTS = 3
_ATTEMPT_S = 5.0


@dataclass
class UnreachedError(Exception):
    """A rank that is up cannot be reached from here."""

    rank: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank} cannot be reached from here: {self.error}"


def address_towards(host: str, port: int = 9) -> str:
    """This machine's address on the network that leads to `host`; its own name may resolve to loopback.

    Raises OSError when no network leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_out_of_reach(error: OSError) -> bool:
    """Whether nothing answered. A refused connection has reached the machine, where no process listens (yet)."""
    return not isinstance(error, ConnectionError)


def try_connect(host: str, port: int, timeout_s: float) -> None:
    """Connects, and closes the connection. Raises OSError."""
    socket.create_connection((host, port), timeout_s).close()


class ReachablePort:
    """The port on which this rank can be reached, and checks of the other ranks' ports, which are in the store."""

    def __init__(self, store: Store, rank: int, world_size: int, address: str) -> None:
        self._store = store
        self._reached: set[str] = set()
        """The hosts that were reached."""
        # Nothing accepts: the kernel makes the connection, and that is proof enough.
        self._listener = socket.create_server((address, 0), backlog=max(min(world_size, 4096), 16))
        store.set(_key(rank), f"{address} {self._listener.getsockname()[1]}")

    def close(self) -> None:
        self._listener.close()

    def wait_for_ranks(self, ranks: Iterable[int]) -> None:
        """Waits until all of `ranks` are up. Raises the store's RuntimeError when they are not up in time."""
        self._store.wait([_key(rank) for rank in ranks])

    def check_reachable(self, ranks: Iterable[int]) -> None:
        """Connects to each host of `ranks` that was not reached before.

        Blocks until they are up. Raises UnreachedError, and the store's RuntimeError when they are not up in time.
        """
        for rank in ranks:
            host, port = self._store.get(_key(rank)).decode().split()
            if host not in self._reached:
                _check_host(rank, host, int(port))
                self._reached.add(host)


def _check_host(rank: int, host: str, port: int) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            try_connect(host, port, _ATTEMPT_S)
        except OSError as error:
            if not is_out_of_reach(error):
                return  # the rank has ended meanwhile, which its presence reports
            if attempt == _ATTEMPTS - 1:
                raise UnreachedError(rank, f"{host}: {first_line(error)}") from error
        else:
            return


def _key(rank: int) -> str:
    return f"reach/{rank}"
