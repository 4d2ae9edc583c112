"""The rendezvous store of a generation: keys and values that only processes with its secret can read or write.

torch's own TCPStore serves every process that can reach its port, and lists all keys, so not even names hide anything
in it. This store serves only connections that have passed the proof of `handshake.py`. Rank 0 serves it
(`rendezvous_server.py`). All ranks, rank 0 too, use it as a `torch.distributed.Store`, from which gloo and NCCL make
their groups.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from varuna.distributed.gloo import keep_alive_forever
from varuna.distributed.handshake import MeetingKey, greet_server
from varuna.distributed.rendezvous_protocol import (
    HANDSHAKE_S,
    NUMBER,
    AnswerStatus,
    StoreOperation,
    pack_message,
    receive_message,
)

__all__ = ["RendezvousStore", "await_value", "is_served", "read_values"]

_ANSWER_S = 60.0
"""Beyond the time limit of a request: rank 0 may be busy with a compiler, or its machine swaps."""
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_CONNECT_S = 5.0
_FIRST_PATIENCE_S = 0.25
"""How long to wait for the first proof from a port. The next time the wait is twice as long."""
_CHANCE = random.SystemRandom()
"""The global generator is the script's."""


class RendezvousStore(Store):
    """The store that rank 0 serves. A wait ends with the time limit of `set_timeout`.

    A request has a connection to itself, so that a wait of one thread keeps no request of another waiting: what it
    waits for may follow from that.
    """

    def __init__(
        self, host: str, key: MeetingKey, timeout: timedelta, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` is called again and again until rank 0 is found: it raises if that is no longer wanted.

        Raises torch.distributed.DistNetworkError when no rank 0 is found within `timeout`.
        """
        super().__init__()
        keep_alive_forever(self)  # C++ calls these methods, and holds no reference to the object that has them
        self.set_timeout(timeout)
        self._host, self._key = host, key
        connection = _connect_to_server(host, key, timeout.total_seconds(), check)
        self._peer = f"{host}:{connection.getpeername()[1]}"
        self._connections, self._free = [connection], [connection]
        self._is_shut_down = False
        self._choosing = threading.Lock()
        """Held while the three before it are read or changed."""

    def shut_down(self) -> None:
        """Makes every request fail, those that are under way too. From any thread."""
        with self._choosing:
            self._is_shut_down = True
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        for connection in self._connections:
            connection.close()

    # torch calls these from C++, under these names

    def set(self, key: str, value: bytes | str) -> None:
        self._request(StoreOperation.SET, [_encode_text(key), _encode_text(value)])

    def get(self, key: str) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(keys, self._limit)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._request(
            StoreOperation.SET, [_encode_text(word) for pair in zip(keys, values, strict=True) for word in pair]
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self._limit if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        (total,) = self._request(StoreOperation.ADD, [_encode_text(key), NUMBER.pack(amount)])
        return int(NUMBER.unpack(total)[0])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request(StoreOperation.CHECK, [_encode_text(key) for key in keys]))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        (value,) = self._request(StoreOperation.COMPARE_SET, [_encode_text(word) for word in (key, expected, desired)])
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._request(StoreOperation.DELETE, [_encode_text(key)]))

    def num_keys(self) -> int:
        (count,) = self._request(StoreOperation.COUNT, [])
        return int(NUMBER.unpack(count)[0])

    def append(self, key: str, value: bytes | str) -> None:
        self._request(StoreOperation.APPEND, [_encode_text(key), _encode_text(value)])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RendezvousStore:
        return self

    deleteKey = delete_key  # noqa: N815 - as C++ calls it
    getNumKeys = num_keys  # noqa: N815

    @property
    def _limit(self) -> timedelta:
        limit: timedelta = super().timeout  # type: ignore[misc]  # torch's stubs leave it out
        return limit

    def _wait(self, keys: Sequence[str], limit: timedelta) -> list[bytes]:
        limit_ms = int(limit.total_seconds() * 1000)
        words = [NUMBER.pack(limit_ms), *(_encode_text(key) for key in keys)]
        return self._request(StoreOperation.WAIT, words, limit.total_seconds()) if keys else []

    def _request(self, op: StoreOperation, words: list[bytes], limit_s: float = 0.0) -> list[bytes]:
        """The answer. Raises DistNetworkError when rank 0 is gone or does not answer, as does every request after that
        one, and DistStoreError when a time limit has run out."""
        try:
            connection = self._take_connection()
            status, answer = self._exchange_messages(connection, pack_message(op, words), limit_s + _ANSWER_S)
            with self._choosing:
                self._free.append(connection)
        except OSError as error:
            raise dist.DistNetworkError(f"the rendezvous store at {self._peer} is gone: {error}") from error
        if status == AnswerStatus.TIMED_OUT:
            raise dist.DistStoreError(f"no rank set {answer[0].decode()} in the rendezvous store within {limit_s:g} s")
        assert status == AnswerStatus.DONE, f"the rendezvous store refused {op.name}"
        return answer

    def _take_connection(self) -> socket.socket:
        """One that no request uses, a new one if need be. Raises OSError, and DistNetworkError if rank 0 is gone."""
        with self._choosing:
            self._check()
            if self._free:
                return self._free.pop()
        made = _connect_to_server(self._host, self._key, _ANSWER_S, self._check)
        with self._choosing:
            self._connections.append(made)
            self._check()
        return made

    def _check(self) -> None:
        """Raises OSError when this store is shut down."""
        if self._is_shut_down:
            raise ConnectionError("it is shut down")

    def _exchange_messages(self, connection: socket.socket, request: bytes, limit_s: float) -> tuple[int, list[bytes]]:
        """Sends a request and receives its answer. Raises OSError."""
        try:
            connection.settimeout(limit_s)
            connection.sendall(request)
            return receive_message(connection)
        except BaseException:
            self.shut_down()  # an answer that comes later would be taken for that of the next request
            raise


def _encode_text(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def read_values(store: Store, keys: Sequence[str]) -> list[str] | None:
    """What ranks have set in a rendezvous store; None: not all have yet, or rank 0 is gone. Does not wait for them."""
    with suppress(dist.DistError):
        if store.check(list(keys)):
            return [value.decode() for value in store.multi_get(list(keys))]
    return None


def await_value(
    store: Store, key: str, stopped: threading.Event, *, look_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> str:
    """What a rank sets in a rendezvous store, as soon as it has. Empty: it is no longer wanted, or `stopped` is set."""
    while is_wanted() and not stopped.is_set():
        if (found := read_values(store, [key])) is not None:
            return found[0]
        stopped.wait(look_s)
    return ""


def is_served(host: str, key: MeetingKey, within_s: float) -> bool:
    """Whether a process at `host` that knows the key's secret serves the store."""
    try:
        _connect_to_server(host, key, within_s).close()
    except dist.DistNetworkError:
        return False
    return True


def _connect_to_server(
    host: str, key: MeetingKey, within_s: float, check: Callable[[], None] = lambda: None
) -> socket.socket:
    """A connection to rank 0, at the first of the key's ports where the server knows the secret.

    At some port may be a process that says nothing: any rank of any job has ports on which it only listens. A long wait
    there would keep this process from finding rank 0 at another one.
    """
    deadline_s = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    fault = "no process listens there"
    patience_s: dict[int, float] = {}
    while True:
        check()
        for port in key.candidate_ports():
            try:
                connection = socket.create_connection((host, port), min(_CONNECT_S, within_s))
            except ConnectionRefusedError:
                continue
            except OSError as error:
                fault = str(error)
                continue
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                greet_server(connection, key, min(patience_s.get(port, _FIRST_PATIENCE_S), HANDSHAKE_S, within_s))
                return connection
            except OSError as error:
                connection.close()
                patience_s[port] = 2 * patience_s.get(port, _FIRST_PATIENCE_S)
                fault = f"at port {port}: {error}"
        if time.monotonic() > deadline_s:
            raise dist.DistNetworkError(f"timed out after {within_s:g} s: {fault}")
        time.sleep(_CHANCE.uniform(0.5, 1.0) * pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
