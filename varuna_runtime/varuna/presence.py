"""Whether all ranks are still there: how a worker hears at once that another's process has ended.

Links and collectives notice a dead peer only while they wait for it. But a rank that meets the others, or loads or
saves a checkpoint, waits in the store or for files, where a dead rank is one that is late. So every rank keeps a
connection to rank 0, which tells all the others when one closes without a goodbye; and when rank 0 dies, all close.

The same connections carry what ranks announce of their calls (`varuna.calls`): to rank 0, which passes on what is new.
At its end a rank waits until all others know of it, for the next thing that they see is that its links close.

A message is a byte, a rank, and two numbers: "b" goodbye, "l" that rank is lost, "a" that a call is known (its number),
and the operations of calls (number, steps). The first one, "h" hello, is a byte and a rank, after the store's token.
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

from varuna.calls import Call, Calls, Operation
from varuna.departure import Departure, PeerLost
from varuna.error_text import first_line
from varuna.reach import is_out_of_reach
from varuna_proto.environment import EXIT_GENERATION_ENDED

__all__ = ["Presence"]

_HELLO = struct.Struct("!cI")
_MESSAGE = struct.Struct("!cIQQ")
_END_KNOWN_S = 5.0
"""How long a rank whose script is over waits, at the longest, until the others know it."""
_KEY = "presence"
_Message = tuple[bytes, int, int, int]
_CONNECT_S = 60.0
_MOST_STRANGERS = 256
"""Connections, beyond the ranks' own, that have not shown the token yet; one more ends the oldest of them."""
_ACCEPT_AGAIN_S = 0.02
_KEEP_ALIVE_S = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that vanishes closes nothing. Its peers notice by themselves in half a minute; the manager is faster."""


class Presence:
    """This rank's part in it; begins with `join`, from one thread per process."""

    def __init__(self, departure: Departure, rank: int, calls: Calls) -> None:
        self._departure = departure
        self._rank = rank
        self._calls = calls
        self._known = threading.Event()
        """That this rank's end is known to all."""
        self._announced: dict[int, Operation] = {}
        """On rank 0, by a call's number: what was passed on last."""
        self._unaware: dict[int, set[int]] = {}
        """On rank 0, by a call's number: the ranks that do not know of it yet."""
        self._askers: dict[int, set[int]] = {}
        """On rank 0, by a call's number: the ranks that wait until all know of it."""
        self._connections: dict[int, socket.socket] = {}
        """On rank 0, by rank: of those that have not ended."""
        calls.announce = self._announce
        self._sockets: list[socket.socket] = []
        self._sending = threading.Lock()
        self._over = False
        # A forked child (a data loader's worker) must not keep the connections of a parent that is dead.
        os.register_at_fork(after_in_child=self._close)

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        store: Store,
        address: str,
        departure: Departure,
        calls: Calls | None = None,
    ) -> Presence:
        """Connects to rank 0, or, on rank 0, lets the others connect at this machine's `address`.

        Raises PeerLost when rank 0 is not there.
        """
        presence = cls(departure, rank, calls or Calls(rank, departure))
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
            connection.sendall(token.encode() + _HELLO.pack(b"h", rank))
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
        if self._departure.exit_code is None:
            self._calls.end()
            self._known.wait(_END_KNOWN_S)
        if self._departure.exit_code in (None, EXIT_GENERATION_ENDED):
            self._over = True
            self._send_all(b"b", 0)

    def _announce(self, call: Call) -> None:
        if self._rank == 0:
            self._pass_on(0, call)
        else:
            self._send_all(call.operation.value, self._rank, call.number, call.steps)

    def _pass_on(self, rank: int, call: Call) -> None:
        """On rank 0: what is new of a number goes to all others. They answer when they know of it."""
        with self._sending:
            is_news = self._announced.get(call.number) is not call.operation
            self._announced[call.number] = call.operation
            if is_news:
                self._unaware[call.number] = set(self._connections) - {rank}
            unaware = self._unaware.get(call.number, set())
            self._askers.setdefault(call.number, set()).add(rank)
        if is_news:
            for other in sorted(unaware):
                self._send(self._connections[other], call.operation.value, rank, call.number, call.steps)
        if rank != 0:
            self._calls.receive(rank, call)
        self._answer(call.number)

    def _answer(self, number: int) -> None:
        """On rank 0: tells the ranks that ask when all know of a call."""
        with self._sending:
            if self._unaware.get(number):
                return
            self._unaware.pop(number, None)
            askers = self._askers.pop(number, set())
        if 0 in askers:
            self._known.set()
        for rank in askers & set(self._connections):
            self._send(self._connections[rank], b"a", rank, number)

    def _forget_rank(self, rank: int) -> None:
        """On rank 0: it has ended."""
        self._connections.pop(rank, None)
        for number, unaware in list(self._unaware.items()):
            unaware.discard(rank)
            self._answer(number)

    def _listen(self, connection: socket.socket) -> None:
        while (message := _receive(connection)) is not None and message[0] not in (b"b", b"l"):
            kind, rank, number, steps = message
            if kind == b"a":
                self._known.set()
            else:
                self._calls.receive(rank, Call(number, Operation(kind), steps))
                self._send(connection, b"a", self._rank, number)
        self._known.set()  # there is nobody who could say so
        if self._over or (message is not None and message[0] == b"b"):
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
                        assert rank is not None
                        message = _receive(connection)
                        if message is not None and message[0] != b"b":
                            self._receive_of_call(rank, message)
                            continue
                        selector.unregister(connection)
                        self._forget_rank(rank)
                        if message is None and not self._over:
                            self._send_all(b"l", rank)
                            self._departure.leave(PeerLost(f"rank {rank} is gone: its process has ended"))

    def _receive_of_call(self, rank: int, message: _Message) -> None:
        kind, _, number, steps = message
        if kind == b"a":
            self._unaware.get(number, set()).discard(rank)
            self._answer(number)
        else:
            self._pass_on(rank, Call(number, Operation(kind), steps))

    def _admit(
        self,
        connection: socket.socket,
        token: bytes,
        strangers: dict[socket.socket, bytes],
        selector: selectors.BaseSelector,
    ) -> None:
        """Hears a stranger out, without waiting for it; who knows the token is a rank."""
        wanted = len(token) + _HELLO.size
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
        _, rank = _HELLO.unpack(said[len(token) :])
        with self._sending:
            self._sockets.append(connection)
            self._connections[rank] = connection
        selector.register(connection, selectors.EVENT_READ, rank)

    def _send_all(self, kind: bytes, rank: int, number: int = 0, steps: int = 0) -> None:
        for connection in list(self._sockets):
            self._send(connection, kind, rank, number, steps)

    def _send(self, connection: socket.socket, kind: bytes, rank: int, number: int = 0, steps: int = 0) -> None:
        with self._sending, suppress(OSError):  # itself gone, or the listener, which has nobody at its other end
            connection.sendall(_MESSAGE.pack(kind, rank, number, steps))

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


def _receive(connection: socket.socket) -> _Message | None:
    """None when the other end is closed or broken."""
    data = _receive_exactly(connection, _MESSAGE.size)
    if data is None:
        return None
    kind, rank, number, steps = _MESSAGE.unpack(data)
    return kind, rank, number, steps


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
