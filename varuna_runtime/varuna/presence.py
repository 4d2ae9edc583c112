"""Whether all ranks are still there: how a worker hears at once that another's process has ended.

Links and collectives notice a dead peer only while they wait for it. But a rank that meets the others, or loads or
saves a checkpoint, waits in the store or for files, where a dead rank is one that is late. So every rank keeps a
connection to rank 0, which tells all the others when one closes without a goodbye; and when rank 0 dies, all close.

A message is a byte and a rank: "h" hello (after the token from the store), "b" goodbye, "l" that rank is lost.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store

from varuna.departure import Departure, PeerLost
from varuna.error_text import first_line
from varuna.reach import is_out_of_reach
from varuna_proto.environment import EXIT_GENERATION_ENDED

__all__ = ["Presence"]

_MESSAGE = struct.Struct("!cI")
_KEY = "presence"
_CONNECT_S = 60.0
_MOST_STRANGERS = 256
"""Connections, beyond the ranks' own, that have not shown the token yet; one more ends the oldest of them."""
_ACCEPT_AGAIN_S = 0.02
_KEEP_ALIVE_S = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that vanishes closes nothing. Its peers notice by themselves in half a minute; the manager is faster."""


class Presence:
    """This rank's part in it; begins with `join`, from one thread per process."""

    def __init__(self, departure: Departure) -> None:
        self._departure = departure
        self._sockets: list[socket.socket] = []
        self._sending = threading.Lock()
        self._over = False
        # A forked child (a data loader's worker) must not keep the connections of a parent that is dead.
        os.register_at_fork(after_in_child=self._close)

    @classmethod
    def join(cls, rank: int, world_size: int, store: Store, address: str, departure: Departure) -> Presence:
        """Connects to rank 0, or, on rank 0, lets the others connect at this machine's `address`.

        Raises PeerLost when rank 0 is not there.
        """
        presence = cls(departure)
        if rank == 0:
            token = secrets.token_hex(16)
            listener = socket.create_server((address, 0), backlog=min(world_size, 4096))
            presence._sockets.append(listener)
            store.set(_KEY, f"{token} {listener.getsockname()[1]} {address}")
            presence._start(lambda: presence._serve(listener, token.encode(), world_size + _MOST_STRANGERS))
            return presence
        try:
            token, port, host = store.get(_KEY).decode().split()
            connection = socket.create_connection((host, int(port)), _CONNECT_S)
            connection.settimeout(None)
            _keep_alive(connection)
            presence._sockets.append(connection)
            connection.sendall(token.encode() + _MESSAGE.pack(b"h", rank))
        except (OSError, RuntimeError) as error:  # the store's errors are RuntimeErrors
            if isinstance(error, OSError) and is_out_of_reach(error):
                departure.leave(PeerLost(f"rank 0 cannot be reached from here: {first_line(error)}", unreached=0))
            departure.leave(PeerLost(f"rank 0 is gone: {first_line(error)}"))
            departure.check()
            raise
        presence._start(lambda: presence._listen(connection))
        return presence

    def say_goodbye(self) -> None:
        """The script is over, or this rank leaves a generation that is over: no loss to the others.

        Does nothing when this rank leaves for another reason.
        """
        if self._departure.exit_code in (None, EXIT_GENERATION_ENDED):
            self._over = True
            self._send_all(b"b", 0)

    def _listen(self, connection: socket.socket) -> None:
        message = _receive(connection)
        if self._over or message == (b"b", 0):
            return
        lost = 0 if message is None else message[1]
        self._departure.leave(PeerLost(f"rank {lost} is gone: its process has ended"))

    def _serve(self, listener: socket.socket, token: bytes, most_strangers: int) -> None:
        strangers: dict[socket.socket, bytes] = {}  # what each has said so far; the oldest first
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    rank: int | None = key.data
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is listener:
                        if len(strangers) >= most_strangers:
                            _forget(next(iter(strangers)), strangers, selector)
                        _accept(listener, strangers, selector)
                    elif connection in strangers:
                        self._admit(connection, token, strangers, selector)
                    elif connection.fileno() >= 0:
                        message = _receive(connection)
                        selector.unregister(connection)
                        if message is None and not self._over:
                            self._send_all(b"l", rank or 0)
                            self._departure.leave(PeerLost(f"rank {rank} is gone: its process has ended"))

    def _admit(
        self,
        connection: socket.socket,
        token: bytes,
        strangers: dict[socket.socket, bytes],
        selector: selectors.BaseSelector,
    ) -> None:
        """Hears a stranger out, without waiting for it; who knows the token is a rank."""
        wanted = len(token) + _MESSAGE.size
        try:
            part = connection.recv(wanted - len(strangers[connection]))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        said = strangers[connection] = strangers[connection] + part
        if part and len(said) < wanted:
            return
        if len(said) < wanted or not secrets.compare_digest(said[: len(token)], token):
            _forget(connection, strangers, selector)
            return
        del strangers[connection]
        selector.unregister(connection)
        connection.setblocking(True)
        _keep_alive(connection)
        _, rank = _MESSAGE.unpack(said[len(token) :])
        with self._sending:
            self._sockets.append(connection)
        selector.register(connection, selectors.EVENT_READ, rank)

    def _send_all(self, kind: bytes, rank: int) -> None:
        with self._sending:
            for connection in self._sockets:
                with suppress(OSError):  # itself gone, or the listener, which has nobody at its other end
                    connection.sendall(_MESSAGE.pack(kind, rank))

    def _start(self, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except BaseException as error:  # else nobody would ever hear of a loss again
                self._departure.fail(error)

        threading.Thread(target=run, name="varuna-presence", daemon=True).start()

    def _close(self) -> None:
        for connection in self._sockets:
            connection.close()


def _accept(listener: socket.socket, strangers: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:  # it has gone again, or this process has no more file descriptors
        time.sleep(_ACCEPT_AGAIN_S)
        return
    connection.setblocking(False)
    strangers[connection] = b""
    selector.register(connection, selectors.EVENT_READ)


def _forget(connection: socket.socket, strangers: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
    del strangers[connection]
    selector.unregister(connection)
    connection.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE_S.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(connection: socket.socket) -> tuple[bytes, int] | None:
    """None when the other end is closed or broken."""
    data = _receive_exactly(connection, _MESSAGE.size)
    if data is None:
        return None
    kind, rank = _MESSAGE.unpack(data)
    return kind, rank


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return data
