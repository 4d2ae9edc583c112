"""A port that is held for the rank 0 of a run until that listens on it."""

from __future__ import annotations

import socket

__all__ = ["hold_port"]


def hold_port(host: str, port: int = 0) -> socket.socket:
    """A socket bound to `port`, or, for 0, to one that is free on all addresses of this machine.

    Nobody else is given the port, but the script's own init_process_group may listen there, before Varuna does.
    Raises OSError when `host` is not one of this machine's, or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind, protocol)
    try:
        if port:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the run before has just ended
            held.bind(address)
        else:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
            # On all addresses, as torch's store listens on all: a connection from another one may have the port.
            # Without SO_REUSEADDR: two sockets that have it may be bound to one port as long as neither listens.
            held.bind(("", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held
