"""Rank 0's part of the rendezvous store: one thread that serves every connection whose other end knows the secret."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import structlog

from varuna.distributed.forked_children import close_in_forked_children
from varuna.distributed.handshake import GREETING_BYTES, PROOF_BYTES, MeetingKey, ServerHandshake, StrangerError
from varuna.distributed.rendezvous_protocol import (
    HANDSHAKE_S,
    LENGTH,
    NUMBER,
    READ_BYTES,
    AnswerStatus,
    StoreOperation,
    pack_message,
    unpack_message,
)
from varuna.distributed.unproven_connections import UnprovenConnections

__all__ = ["RendezvousServer"]

_log = structlog.get_logger("varuna")

_MAX_MESSAGE_BYTES = 1 << 28
_MOST_STRANGERS = 256
_EXPIRY_CHECK_S = 1.0
"""How often the server ends what has waited beyond its time limit."""


class _ClientConnection:
    """One connection, as the server sees it."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.received = bytearray()
        self.to_send = bytearray()
        self.handshake: ServerHandshake | None = None
        self.is_proven = False
        self.proof_deadline_s = time.monotonic() + HANDSHAKE_S
        self.awaited_keys: list[bytes] = []
        self.wait_deadline_s = 0.0


class RendezvousServer:
    """Serves the store in a thread, from its making until `stop` or the end of the process."""

    def __init__(self, host: str, key: MeetingKey) -> None:
        """Listens at this machine's address `host`. Raises OSError when none of the key's ports is free there."""
        self._key = key
        self._values: dict[bytes, bytes] = {}
        self._clients: dict[socket.socket, _ClientConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[bytes, list[_ClientConnection]] = {}
        """The clients that wait for keys, by one of these that is missing."""
        self._last_expiry_s = time.monotonic()
        self._turned_away: set[str] = set()
        self._is_stopped = False
        self._listener = _listen_on_free_port(host, key.candidate_ports())
        self.port: int = self._listener.getsockname()[1]
        self._unproven = UnprovenConnections(
            self._listener, _MOST_STRANGERS, lambda connection: self._close_client(self._clients[connection])
        )
        self._selector.register(self._listener, selectors.EVENT_READ)
        close_in_forked_children(self._listener)
        threading.Thread(target=self._serve, name="varuna-rendezvous", daemon=True).start()

    def stop(self) -> None:
        """Closes the port and all connections, within a second."""
        self._is_stopped = True

    def _serve(self) -> None:
        while not self._is_stopped:
            for selected, events in self._selector.select(_EXPIRY_CHECK_S):
                client: _ClientConnection | None = selected.data
                if client is None:
                    self._accept_client()
                elif client.connection.fileno() >= 0:
                    self._handle_events(client, events)
            if time.monotonic() - self._last_expiry_s > _EXPIRY_CHECK_S:
                self._last_expiry_s = time.monotonic()
                self._expire_clients()
        for client in tuple(self._clients.values()):
            self._close_client(client)
        self._selector.close()
        self._listener.close()

    def _handle_events(self, client: _ClientConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send_pending(client)
            if events & selectors.EVENT_READ:
                part = client.connection.recv(READ_BYTES)
                if not part:
                    raise ConnectionError("closed")
                client.received += part
                self._read_messages(client)
        except BlockingIOError:
            pass
        except StrangerError as error:
            if client.address not in self._turned_away:
                self._turned_away.add(client.address)
                _log.warning("a stranger at the rendezvous was turned away", address=client.address, reason=str(error))
            self._close_client(client)
        except (OSError, ValueError, struct.error):  # it is gone, or breaks the protocol
            self._close_client(client)

    def _accept_client(self) -> None:
        accepted = self._unproven.accept_connection()
        if accepted is None:
            return
        connection, address = accepted
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = self._clients[connection] = _ClientConnection(connection, address)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _read_messages(self, client: _ClientConnection) -> None:
        """Handles the complete messages that have arrived. Raises StrangerError, ValueError, OSError."""
        if client.handshake is None:
            ServerHandshake.check_beginning(client.received)
            if len(client.received) < GREETING_BYTES:
                return
            client.handshake = ServerHandshake(self._key, _cut_bytes(client.received, GREETING_BYTES))
            self._send_bytes(client, client.handshake.answer)
        if not client.is_proven:
            if len(client.received) < PROOF_BYTES:
                return
            client.handshake.check_proof(_cut_bytes(client.received, PROOF_BYTES))
            client.is_proven = True
            self._unproven.discard_connection(client.connection)
        while len(client.received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(client.received)
            if length > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if len(client.received) < LENGTH.size + length:
                return
            op, words = unpack_message(_cut_bytes(client.received, LENGTH.size + length)[LENGTH.size :])
            self._answer_request(client, StoreOperation(op), words)

    def _answer_request(self, client: _ClientConnection, op: StoreOperation, words: list[bytes]) -> None:
        values = self._values
        match op, words:
            case StoreOperation.SET, pairs if len(pairs) % 2 == 0:
                values.update(zip(pairs[::2], pairs[1::2], strict=True))
                self._send_reply(client)
                for key in pairs[::2]:
                    self._answer_waiting(key)
            case StoreOperation.WAIT, [limit, *keys]:
                (limit_ms,) = NUMBER.unpack(limit)
                client.awaited_keys, client.wait_deadline_s = keys, time.monotonic() + limit_ms / 1000
                self._reply_if_present(client)
            case StoreOperation.ADD, [key, amount]:
                total = int(values.get(key, b"0")) + NUMBER.unpack(amount)[0]
                values[key] = str(total).encode()  # as TCPStore has it
                self._send_reply(client, NUMBER.pack(total))
                self._answer_waiting(key)
            case StoreOperation.CHECK, keys:
                self._send_reply(client, *([b"1"] if all(key in values for key in keys) else []))
            case StoreOperation.COMPARE_SET, [key, expected, desired]:
                current = values.get(key)
                if current == expected or (current is None and not expected):
                    values[key] = current = desired
                    self._answer_waiting(key)
                self._send_reply(client, expected if current is None else current)
            case StoreOperation.DELETE, [key]:
                self._send_reply(client, *([b"1"] if values.pop(key, None) is not None else []))
            case StoreOperation.COUNT, []:
                self._send_reply(client, NUMBER.pack(len(values)))
            case StoreOperation.APPEND, [key, value]:
                values[key] = values.get(key, b"") + value
                self._send_reply(client)
                self._answer_waiting(key)
            case _:
                self._send_bytes(client, pack_message(AnswerStatus.REFUSED, ()))

    def _send_reply(self, client: _ClientConnection, *words: bytes) -> None:
        self._send_bytes(client, pack_message(AnswerStatus.DONE, words))

    def _reply_if_present(self, client: _ClientConnection) -> None:
        keys = client.awaited_keys
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            self._waiting.setdefault(missing, []).append(client)
            return
        client.awaited_keys = []
        self._send_reply(client, *(self._values[key] for key in keys))

    def _answer_waiting(self, key: bytes) -> None:
        for client in self._waiting.pop(key, ()):
            if client.awaited_keys:
                try:
                    self._reply_if_present(client)
                except OSError:
                    self._close_client(client)

    def _send_bytes(self, client: _ClientConnection, data: bytes) -> None:
        client.to_send += data
        self._send_pending(client)

    def _send_pending(self, client: _ClientConnection) -> None:
        with suppress(BlockingIOError):
            while client.to_send:
                del client.to_send[: client.connection.send(client.to_send)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
        if self._selector.get_key(client.connection).events != wanted:
            self._selector.modify(client.connection, wanted, client)

    def _expire_clients(self) -> None:
        now_s = time.monotonic()
        for client in tuple(self._clients.values()):
            if not client.is_proven and now_s > client.proof_deadline_s:
                self._close_client(client)
            elif client.awaited_keys and now_s > client.wait_deadline_s:
                missing = next(key for key in client.awaited_keys if key not in self._values)
                client.awaited_keys = []
                try:
                    self._send_bytes(client, pack_message(AnswerStatus.TIMED_OUT, [missing]))
                except OSError:
                    self._close_client(client)

    def _close_client(self, client: _ClientConnection) -> None:
        client.awaited_keys = []
        self._unproven.discard_connection(client.connection)
        if self._clients.pop(client.connection, None) is not None:
            self._selector.unregister(client.connection)
            client.connection.close()


def _cut_bytes(buffer: bytearray, count: int) -> bytes:
    """Removes the first `count` bytes of `buffer` and returns them."""
    first = bytes(buffer[:count])
    del buffer[:count]
    return first


def _listen_on_free_port(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        with suppress(OSError):  # taken; the other ranks try all of these ports, too
            return socket.create_server(
                (host, port), family=socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0], backlog=4096
            )
    raise OSError(f"none of the ports {', '.join(map(str, ports))} is free on {host}")
