"""The rendezvous store of a generation: keys and values that only processes with its secret can read or write.

torch's own TCPStore serves whoever can reach its port, and lists all keys, so not even names hide anything in it. This
one serves only connections that have passed `varuna.handshake`. Rank 0 serves it from one thread, and all ranks, rank 0
among them, use it as a `torch.distributed.Store`, from which gloo and NCCL make their groups.

A message is its length, an operation or status, and byte strings, each with its length before it.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum

import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from varuna._gloo import keep_for_ever
from varuna.handshake import GREETING_BYTES, PROOF_BYTES, Greeting, MeetingKey, StrangerError, greet

__all__ = ["RendezvousServer", "RendezvousStore", "is_served"]

_log = structlog.get_logger("varuna")

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!q")
_MAX_MESSAGE_BYTES = 1 << 28
_READ_BYTES = 1 << 18
_HANDSHAKE_S = 10.0
_MOST_STRANGERS = 256
"""Connections that have not proved themselves yet. One more ends the oldest of them."""
_ANSWER_S = 60.0
"""Beyond the time limit of a request: rank 0 may be busy with a compiler, or its machine swaps."""
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_CONNECT_S = 5.0
_LOOK_UP_S = 1.0
"""How often the server looks whose time is over."""
_CHANCE = random.SystemRandom()
"""The global generator is the script's."""


class _Op(IntEnum):
    SET = 1
    WAIT = 2
    """Milliseconds, keys: answered when all are there, with their values."""
    ADD = 3
    CHECK = 4
    COMPARE_SET = 5
    DELETE = 6
    COUNT = 7
    APPEND = 8


class _Status(IntEnum):
    DONE = 0
    TIMED_OUT = 1
    REFUSED = 2


def _packed(kind: int, words: Iterable[bytes]) -> bytes:
    body = bytes([kind]) + b"".join(_LENGTH.pack(len(word)) + word for word in words)
    return _LENGTH.pack(len(body)) + body


def _unpacked(body: bytes) -> tuple[int, list[bytes]]:
    """Raises ValueError for what `_packed` has not made."""
    if not body:
        raise ValueError("an empty message")
    words, at = [], 1
    while at < len(body):
        start = at + _LENGTH.size
        at = start + int.from_bytes(body[at:start], "big")
        if start > len(body) or at > len(body):
            raise ValueError("a word ends beyond its message")
        words.append(body[start:at])
    return body[0], words


class _Client:
    """One connection, as the server sees it."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.received = bytearray()
        self.to_send = bytearray()
        self.greeting: Greeting | None = None
        self.is_known = False
        self.strange_until_s = time.monotonic() + _HANDSHAKE_S
        self.waits_for: list[bytes] = []
        self.waits_until_s = 0.0


class RendezvousServer:
    """Serves the store in a thread, from its making until the process ends."""

    def __init__(self, host: str, key: MeetingKey) -> None:
        """Listens at this machine's address `host`. Raises OSError when none of the key's ports is free there."""
        self._key = key
        self._values: dict[bytes, bytes] = {}
        self._clients: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[bytes, list[_Client]] = {}
        """By one key that is missing of those for which they wait."""
        self._expired_s = time.monotonic()
        self._turned_away: set[str] = set()
        self._listener = _listen(host, key.ports())
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)
        # A forked child (a data loader's worker) must not keep the port of a parent that is dead.
        os.register_at_fork(after_in_child=self._listener.close)
        threading.Thread(target=self._serve, name="varuna-rendezvous", daemon=True).start()

    def _serve(self) -> None:
        while True:
            for selected, events in self._selector.select(_LOOK_UP_S):
                client: _Client | None = selected.data
                if client is None:
                    self._accept()
                elif client.connection.fileno() >= 0:
                    self._handle(client, events)
            if time.monotonic() - self._expired_s > _LOOK_UP_S:
                self._expired_s = time.monotonic()
                self._expire()

    def _handle(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                part = client.connection.recv(_READ_BYTES)
                if not part:
                    raise ConnectionError("closed")
                client.received += part
                self._take(client)
        except BlockingIOError:
            pass
        except StrangerError as error:
            if client.address not in self._turned_away:
                self._turned_away.add(client.address)
                _log.warning("a stranger at the rendezvous was turned away", address=client.address, reason=str(error))
            self._close(client)
        except (OSError, ValueError, struct.error):  # gone, or it does not keep to the protocol
            self._close(client)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it has gone again, or this process has no more file descriptors
            time.sleep(_FIRST_PAUSE_S)
            return
        strangers = [client for client in self._clients.values() if not client.is_known]
        if len(strangers) >= _MOST_STRANGERS:
            self._close(strangers[0])
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = self._clients[connection.fileno()] = _Client(connection, str(address[0]))
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _take(self, client: _Client) -> None:
        """What has come in, as far as it is complete. Raises StrangerError, ValueError, OSError."""
        if client.greeting is None:
            Greeting.check_beginning(client.received)
            if len(client.received) < GREETING_BYTES:
                return
            client.greeting = Greeting(self._key, _cut(client.received, GREETING_BYTES))
            self._send(client, client.greeting.answer)
        if not client.is_known:
            if len(client.received) < PROOF_BYTES:
                return
            client.greeting.check(_cut(client.received, PROOF_BYTES))
            client.is_known = True
        while len(client.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(client.received)
            if length > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if len(client.received) < _LENGTH.size + length:
                return
            op, words = _unpacked(_cut(client.received, _LENGTH.size + length)[_LENGTH.size :])
            self._answer(client, _Op(op), words)

    def _answer(self, client: _Client, op: _Op, words: list[bytes]) -> None:
        values = self._values
        match op, words:
            case _Op.SET, pairs if len(pairs) % 2 == 0:
                values.update(zip(pairs[::2], pairs[1::2], strict=True))
                self._reply(client)
                for key in pairs[::2]:
                    self._wake(key)
            case _Op.WAIT, [limit, *keys]:
                (limit_ms,) = _NUMBER.unpack(limit)
                client.waits_for, client.waits_until_s = keys, time.monotonic() + limit_ms / 1000
                self._reply_if_there(client)
            case _Op.ADD, [key, amount]:
                total = int(values.get(key, b"0")) + _NUMBER.unpack(amount)[0]
                values[key] = str(total).encode()  # as TCPStore has it
                self._reply(client, _NUMBER.pack(total))
                self._wake(key)
            case _Op.CHECK, keys:
                self._reply(client, *([b"1"] if all(key in values for key in keys) else []))
            case _Op.COMPARE_SET, [key, expected, desired]:
                current = values.get(key)
                if current == expected or (current is None and not expected):
                    values[key] = current = desired
                    self._wake(key)
                self._reply(client, expected if current is None else current)
            case _Op.DELETE, [key]:
                self._reply(client, *([b"1"] if values.pop(key, None) is not None else []))
            case _Op.COUNT, []:
                self._reply(client, _NUMBER.pack(len(values)))
            case _Op.APPEND, [key, value]:
                values[key] = values.get(key, b"") + value
                self._reply(client)
                self._wake(key)
            case _:
                self._send(client, _packed(_Status.REFUSED, ()))

    def _reply(self, client: _Client, *words: bytes) -> None:
        self._send(client, _packed(_Status.DONE, words))

    def _reply_if_there(self, client: _Client) -> None:
        keys = client.waits_for
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            self._waiting.setdefault(missing, []).append(client)
            return
        client.waits_for = []
        self._reply(client, *(self._values[key] for key in keys))

    def _wake(self, key: bytes) -> None:
        for client in self._waiting.pop(key, ()):
            if client.waits_for:
                try:
                    self._reply_if_there(client)
                except OSError:
                    self._close(client)

    def _send(self, client: _Client, data: bytes) -> None:
        client.to_send += data
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        with suppress(BlockingIOError):
            while client.to_send:
                del client.to_send[: client.connection.send(client.to_send)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
        if self._selector.get_key(client.connection).events != wanted:
            self._selector.modify(client.connection, wanted, client)

    def _expire(self) -> None:
        now_s = time.monotonic()
        for client in tuple(self._clients.values()):
            if not client.is_known and now_s > client.strange_until_s:
                self._close(client)
            elif client.waits_for and now_s > client.waits_until_s:
                missing = next(key for key in client.waits_for if key not in self._values)
                client.waits_for = []
                try:
                    self._send(client, _packed(_Status.TIMED_OUT, [missing]))
                except OSError:
                    self._close(client)

    def _close(self, client: _Client) -> None:
        client.waits_for = []
        if self._clients.pop(client.connection.fileno(), None) is not None:
            self._selector.unregister(client.connection)
            client.connection.close()


def _cut(buffer: bytearray, count: int) -> bytes:
    """The first bytes of `buffer`, which are no longer in it."""
    first = bytes(buffer[:count])
    del buffer[:count]
    return first


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        with suppress(OSError):  # taken: the others look at all of them, too
            return socket.create_server(
                (host, port), family=socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0], backlog=4096
            )
    raise OSError(f"none of the ports {', '.join(map(str, ports))} is free on {host}")


class RendezvousStore(Store):
    """A connection to the store that rank 0 serves. Waits as long as `set_timeout` says."""

    def __init__(self, host: str, key: MeetingKey, timeout: timedelta) -> None:
        """Raises torch.distributed.DistNetworkError when no rank 0 is found within `timeout`."""
        super().__init__()
        keep_for_ever(self)  # C++ calls these methods, and holds no reference to the object that has them
        self.set_timeout(timeout)
        self._requesting = threading.Lock()
        self._connection = _find(host, key, timeout.total_seconds())
        self._peer = f"{host}:{self._connection.getpeername()[1]}"

    # What torch calls from C++, and under these names

    def set(self, key: str, value: bytes | str) -> None:
        self._request(_Op.SET, [_encoded(key), _encoded(value)])

    def get(self, key: str) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(keys, self._limit)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._request(_Op.SET, [_encoded(word) for pair in zip(keys, values, strict=True) for word in pair])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self._limit if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        (total,) = self._request(_Op.ADD, [_encoded(key), _NUMBER.pack(amount)])
        return int(_NUMBER.unpack(total)[0])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request(_Op.CHECK, [_encoded(key) for key in keys]))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        (value,) = self._request(_Op.COMPARE_SET, [_encoded(word) for word in (key, expected, desired)])
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._request(_Op.DELETE, [_encoded(key)]))

    def num_keys(self) -> int:
        (count,) = self._request(_Op.COUNT, [])
        return int(_NUMBER.unpack(count)[0])

    def append(self, key: str, value: bytes | str) -> None:
        self._request(_Op.APPEND, [_encoded(key), _encoded(value)])

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
        words = [_NUMBER.pack(limit_ms), *(_encoded(key) for key in keys)]
        return self._request(_Op.WAIT, words, limit.total_seconds()) if keys else []

    def _request(self, op: _Op, words: list[bytes], limit_s: float = 0.0) -> list[bytes]:
        """The answer. Raises DistNetworkError when rank 0 is gone, DistStoreError when a time limit has run out."""
        try:
            with self._requesting:
                self._connection.settimeout(limit_s + _ANSWER_S)
                self._connection.sendall(_packed(op, words))
                (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
                status, answer = _unpacked(self._receive(length))
        except OSError as error:
            raise dist.DistNetworkError(f"the rendezvous store at {self._peer} is gone: {error}") from error
        if status == _Status.TIMED_OUT:
            raise dist.DistStoreError(f"waited {limit_s:g} s in vain for {answer[0].decode()} in the rendezvous store")
        assert status == _Status.DONE, f"the rendezvous store refused {op.name}"
        return answer

    def _receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._connection.recv(min(count - len(data), _READ_BYTES))
            if not part:
                raise ConnectionError("it has closed the connection")
            data += part
        return bytes(data)


def _encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def is_served(host: str, key: MeetingKey, within_s: float) -> bool:
    """Whether somebody at `host` who knows the key's secret serves the store."""
    try:
        _find(host, key, within_s).close()
    except dist.DistNetworkError:
        return False
    return True


def _find(host: str, key: MeetingKey, within_s: float) -> socket.socket:
    """A connection to rank 0, at the first of the key's ports where somebody knows the secret."""
    deadline_s = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    fault = "nobody listens there"
    while True:
        for port in key.ports():
            try:
                connection = socket.create_connection((host, port), min(_CONNECT_S, within_s))
            except ConnectionRefusedError:
                continue
            except OSError as error:
                fault = str(error)
                continue
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                greet(connection, key, min(_HANDSHAKE_S, within_s))
                return connection
            except OSError as error:
                connection.close()
                fault = f"at port {port}: {error}"
        if time.monotonic() > deadline_s:
            raise dist.DistNetworkError(f"timed out after {within_s:g} s: {fault}")
        time.sleep(_CHANCE.uniform(0.5, 1.0) * pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
