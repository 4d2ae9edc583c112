"""The sockets of gloo groups, by which a process that outlives its generation breaks them.

A wait inside gloo for a rank that is gone, or that has left, may never end: `ProcessGroupGloo.abort` and `shutdown` end
neither a receive nor a collective (measured with torch 2.13). They end as soon as their connections do. gloo gives its
sockets to no caller, so this module finds them: those that are new after the group is connected.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

__all__ = ["Sockets", "can_find_sockets", "list_sockets", "shut_down_sockets"]

_FOLDER = "/proc/self/fd"

Sockets = frozenset[tuple[int, int]]
"""Descriptors of sockets, each with its inode, which no other socket of this process ever has."""


def can_find_sockets() -> bool:
    """Whether this system shows a process its descriptors (Linux)."""
    return os.path.isdir(_FOLDER)  # noqa: PTH112 - a name of the kernel's


def list_sockets() -> Sockets:
    """The sockets that this process has open; empty where the system does not show them."""
    found = set()
    with suppress(FileNotFoundError):
        for name in os.listdir(_FOLDER):  # noqa: PTH208 - as above
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return frozenset(found)


def shut_down_sockets(sockets: Sockets) -> None:
    """Shuts down the TCP connections among `sockets`; whatever waits for them fails. Closed ones are left alone."""
    for descriptor, inode in sockets:
        with suppress(OSError):
            copy = os.dup(descriptor)
            if os.fstat(copy).st_ino != inode:  # the number has been given to another file
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # a listener has no peer: gloo ends the process when its listener fails
                    connection.shutdown(socket.SHUT_RDWR)
