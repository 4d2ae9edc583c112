"""How many connections a caller may hold, and for how long a connection may be idle.

These limits hold before the caller is authenticated: without them, idle connections could keep all other callers out.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from varuna_manager.jobs.archives import MOST_BYTES
from varuna_proto.hosts import Network, caller_of, is_in


class LimitedListener(socket.socket):
    """A listening socket that holds at most `most` connections, and at most `most_per_address` of one caller.

    It counts connections when it accepts them, so that one whose TLS handshake never ends counts too. Only `most` holds
    for the `proxies`, because each of them stands for many callers.
    """

    def __init__(
        self, listening: socket.socket, *, most: int, most_per_address: int, proxies: Sequence[Network] = ()
    ) -> None:
        """Takes the socket over: the caller can no longer use `listening`."""
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._most = most
        self._most_per_address = most_per_address
        self._proxies = proxies
        self.held: Counter[str] = Counter()
        """Open connections by caller."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Closes a connection beyond the limits and raises ConnectionAbortedError."""
        accepted, peer = super().accept()
        caller = caller_of(peer[0])
        is_over = self.held[caller] >= self._most_per_address and not is_in(peer[0], self._proxies)
        if is_over or self.held.total() >= self._most:
            accepted.close()
            raise ConnectionAbortedError(f"{caller} holds {self.held[caller]} of {self.held.total()} connections")
        self.held[caller] += 1
        return _CountedConnection(accepted, lambda: self._forget(caller)), peer

    def _forget(self, caller: str) -> None:
        self.held[caller] -= 1
        if not self.held[caller]:
            del self.held[caller]


class _CountedConnection(socket.socket):
    """An accepted socket that calls `on_end` once: when it is closed or garbage-collected."""

    def __init__(self, accepted: socket.socket, on_end: Callable[[], None]) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._end = weakref.finalize(self, on_end)
        self._end.atexit = False

    def close(self) -> None:
        super().close()
        self._end()


_FIRST_REQUEST = ("head", None)
"""What a caller must send first on its connection."""


class PatientHttp(H11Protocol):
    """uvicorn's HTTP/1.1 with a time limit for each part of a request; it closes the connection of a slow caller."""

    head_s = 15.0
    """Limit for a request's line and headers."""
    body_s = 30.0
    """Limit for a request's body, plus the time for its announced size at `body_bytes_per_s`."""
    body_bytes_per_s = 64 * 1024
    rest_s = 30.0
    """Limit for the rest of a body after the request was answered, so that the caller can read the answer."""
    unread_s = 60.0
    """Limit for reading some of an answer."""
    first_request_s = 1.0
    """Limit for the first request of a connection when the server stops: it may be on its way."""

    _awaited: tuple[str, object] | None = None
    """What the caller must send next ("head", "body" or "rest"), and the request that it belongs to."""
    _is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sending, self._reading = _Timer(self.loop), _Timer(self.loop)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        if self._is_stopping and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def shutdown(self) -> None:
        """The server stops. uvicorn alone would close a new connection whose first request it has not read yet."""
        if self._awaited == _FIRST_REQUEST and not self._is_stopping:
            self._is_stopping = True
            self._sending.start(self.first_request_s, self.transport.close)
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.start(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._sending.stop()
        self._reading.stop()

    def _watch(self) -> None:
        """Restart the timer when the caller has to send something else than before."""
        awaited = self._next_awaited()
        if awaited == self._awaited:
            return
        self._awaited = awaited
        self._sending.stop()
        if awaited is not None and not self.transport.is_closing():
            self._sending.start(self._limit_s(awaited[0]), self.transport.abort)

    def _next_awaited(self) -> tuple[str, object] | None:
        if self.conn.their_state is h11.IDLE:
            return "head", self.cycle
        if self.conn.their_state is h11.SEND_BODY:
            return "rest" if self.cycle.response_complete else "body", self.cycle
        return None

    def _limit_s(self, awaited: str) -> float:
        if awaited == "head":
            return self.head_s
        if awaited == "rest":
            return self.rest_s
        announced = next((value for name, value in self.headers if name == b"content-length"), b"0")
        return self.body_s + min(int(announced), MOST_BYTES) / self.body_bytes_per_s


class _Timer:
    """Calls a function once after a time, unless it is stopped before.

    It waits once more if it rings late: the machine has stood still, perhaps with the caller on it.
    """

    late_s = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, after_s: float, call: Callable[[], None]) -> None:
        self.stop()
        self._handle = self._loop.call_later(after_s, self._ring, after_s, call)

    def _ring(self, after_s: float, call: Callable[[], None]) -> None:
        assert self._handle is not None
        if self._loop.time() - self._handle.when() > self.late_s:
            self._handle = self._loop.call_later(after_s, call)
        else:
            call()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
