"""The address by which other VMs reach this one."""

from __future__ import annotations

import socket
from contextlib import closing

AUTO = "auto"


def own_address(manager: str) -> str:
    """The address of this machine from which it reaches a manager (host:port; several are separated by commas).

    Sends nothing: the kernel only looks up the route. Raises ValueError when there is none.
    """
    trouble = ""
    for address in manager.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            family, kind, protocol, _, peer = found[0]
            with closing(socket.socket(family, kind, protocol)) as probe:
                probe.connect(peer)
                return str(probe.getsockname()[0])
        except (OSError, ValueError) as error:
            trouble = f"{address.strip()}: {error}"
    raise ValueError(f"--host {AUTO}: no way to the manager is known ({trouble}): give this VM's address")
