"""A holder gives its state: it publishes its inventory to the next generation, and serves its files."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from varuna.diagnostics.error_text import first_line
from varuna.distributed.forked_children import close_in_forked_children
from varuna.distributed.gloo import let_go
from varuna.distributed.handshake import GREETING_BYTES, PROOF_BYTES, MeetingKey, ServerHandshake, StrangerError
from varuna.distributed.reach import address_towards
from varuna.distributed.rendezvous import RENDEZVOUS_TIMEOUT, store_prefix
from varuna.distributed.rendezvous_protocol import (
    HANDSHAKE_S,
    AnswerStatus,
    pack_message,
    receive_into,
    receive_message,
)
from varuna.distributed.rendezvous_store import RendezvousStore
from varuna.distributed.unproven_connections import UnprovenConnections
from varuna.holdings.inventory import HeldFiles, Inventory, encode_inventories
from varuna.holdings.transfer_protocol import (
    CHUNK_BYTES,
    CHUNK_HEADER,
    FETCH,
    LARGEST_MESSAGE_BYTES,
    NUMBER,
    SILENCE_S,
    sum_chunk,
)
from varuna_proto.environment import WorkerEnvironment

__all__ = ["DONE_KEY", "GivenState", "HolderServer", "HolderSession", "StateServer", "inventory_key", "send_chunk"]

_log = structlog.get_logger("varuna")

DONE_KEY = "holders/done"
"""In the new generation's rendezvous store: all its ranks have the state."""
_MOST_STRANGERS = 64
_MOST_PARTS = 512
"""Of one system call; Linux takes 1024."""
_CLOSE_CHECK_S = 0.5
_LAST_CHUNK_S = 5.0
"""How long `HolderServer.close` waits for a thread that still copies from a device, or counts what it gave."""
_LOOK_S = timedelta(seconds=5)
"""How long one request for `DONE_KEY` waits in the rendezvous store."""


def inventory_key(rank: int) -> str:
    """Where in the new generation's rendezvous store the process publishes its inventories that was `rank` before."""
    return f"holders/{rank}"


class StateServer(ABC):
    """Answers the requests of processes that know the generation's secret, from its making until `close`."""

    largest_request_bytes = LARGEST_MESSAGE_BYTES

    def __init__(self, key: MeetingKey, host: str) -> None:
        """Listens on a free port of this machine's address `host`. Raises OSError when that is not possible."""
        self._key = key
        self._lock = threading.Lock()
        self._serving: dict[socket.socket, threading.Thread] = {}
        """The connections that have proven themselves."""
        self._is_closed = False
        self._turned_away: set[str] = set()
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self._unproven = UnprovenConnections(self._listener, _MOST_STRANGERS, self._evict)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        close_in_forked_children(self._listener)
        threading.Thread(target=self._accept_connections, name="varuna-holder", daemon=True).start()

    @abstractmethod
    def _answer_request(self, connection: socket.socket, kind: int, words: Sequence[bytes]) -> None:
        """Raises OSError, ValueError or struct.error to end the connection."""

    def shut_down(self) -> None:
        """Closes the port and all connections. From any thread."""
        with self._lock:
            self._is_closed = True
            serving = dict(self._serving)
        for connection in (self._listener, *serving):
            _shut_down(connection)

    def close(self) -> None:
        """As `shut_down`, but not from the server's own threads, for which it waits: all that was given is counted
        then, and nobody reads what is held."""
        self.shut_down()
        with self._lock:
            serving = dict(self._serving)
        deadline_s = time.monotonic() + _LAST_CHUNK_S
        for thread in serving.values():
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _accept_connections(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                if not selector.select(_CLOSE_CHECK_S):
                    continue
                with self._lock:
                    accepted = self._unproven.accept_connection()
                if accepted is not None:
                    thread = threading.Thread(target=self._serve, args=accepted, name="varuna-giving", daemon=True)
                    thread.start()
        self._listener.close()

    def _evict(self, connection: socket.socket) -> None:
        """Ends the oldest unproven connection: its thread, which has it, notices."""
        self._unproven.discard_connection(connection)
        _shut_down(connection)

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            self._check_proof(connection)
            while True:
                connection.settimeout(None)
                kind, words = receive_message(connection, self.largest_request_bytes)
                connection.settimeout(SILENCE_S)
                self._answer_request(connection, kind, words)
        except StrangerError as error:
            if address not in self._turned_away:
                self._turned_away.add(address)
                _log.warning("a stranger was turned away who asked for state", address=address, reason=str(error))
        except (OSError, ValueError, struct.error):  # it is gone, or breaks the protocol
            pass
        finally:
            with self._lock:
                self._unproven.discard_connection(connection)
                self._serving.pop(connection, None)
            connection.close()

    def _check_proof(self, connection: socket.socket) -> None:
        deadline_s = time.monotonic() + HANDSHAKE_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(HANDSHAKE_S)
        greeting, proof = bytearray(GREETING_BYTES), bytearray(PROOF_BYTES)
        receive_into(connection, memoryview(greeting), deadline_s)
        handshake = ServerHandshake(self._key, bytes(greeting))
        connection.sendall(handshake.answer)
        receive_into(connection, memoryview(proof), deadline_s)
        handshake.check_proof(bytes(proof))
        with self._lock:
            self._unproven.discard_connection(connection)
            if self._is_closed:
                raise ConnectionError("closed")
            self._serving[connection] = threading.current_thread()


class HolderServer(StateServer):
    """Serves the files of the states that a process holds."""

    def __init__(self, held: HeldFiles, key: MeetingKey, host: str, copies: Iterable[HeldFiles] = ()) -> None:
        """`copies`: what the process keeps besides its own state. Raises OSError as its base does."""
        self._held = {(one.inventory.rank, one.inventory.step): one for one in (*copies, held)}
        self.bytes_given = 0
        self.files_given = 0
        """Files that were given to their ends, each as often as it was fetched."""
        super().__init__(key, host)

    @property
    def inventories(self) -> list[Inventory]:
        """Of all states that are served, each once."""
        return [held.inventory for held in self._held.values()]

    def _answer_request(self, connection: socket.socket, kind: int, words: Sequence[bytes]) -> None:
        if kind != FETCH or len(words) != 4:
            raise ValueError("no request for a file")
        rank, step, offset = (NUMBER.unpack(words[place])[0] for place in (0, 1, 3))
        name, held = words[2].decode(), self._held.get((rank, step))
        file = None if held is None else held.files.get(name)
        fault = ""
        if held is None:
            fault = f"it does not hold step {step} of rank {rank}"
        elif file is None:
            fault = f"it has no {name}"
        if file is None or fault:
            connection.sendall(pack_message(AnswerStatus.REFUSED, [fault.encode()]))
            return
        connection.sendall(pack_message(AnswerStatus.DONE, [NUMBER.pack(file.bytes)]))
        for chunk in file.iterate_chunks(offset, CHUNK_BYTES):
            size = send_chunk(connection, chunk)
            with self._lock:
                self.bytes_given += size
        with self._lock:
            self.files_given += 1


class GivenState(NamedTuple):
    """How a holder's session ended."""

    bytes: int
    """That other processes have taken."""
    is_taken: bool
    """All ranks of the new generation have their state. Otherwise this one may be needed again."""
    reason: str
    """Why the session ended."""


class _StoppedError(Exception):
    """The session has been stopped."""


class HolderSession:
    """A holder's part in the start of one new generation."""

    def __init__(self, held: HeldFiles, environment: WorkerEnvironment, copies: Sequence[HeldFiles] = ()) -> None:
        """`environment`: of the new generation, with its secret; its rank is not used. `copies`: what the process keeps
        besides its own state."""
        self._held = held
        self._copies = copies
        self._environment = environment
        self._lock = threading.Lock()
        self._is_stopped = False
        self._store: RendezvousStore | None = None

    def stop(self) -> None:
        """Makes `give_state` return soon. From any thread, at any time."""
        with self._lock:
            self._is_stopped = True
            store = self._store
        if store is not None:
            store.shut_down()

    def give_state(self) -> GivenState:
        """Gives the state until all ranks have it, the generation's rendezvous store is gone, or `stop` is called.

        Never raises for what other processes do.
        """
        environment = self._environment
        key = MeetingKey.from_environment(environment)
        try:
            host = address_towards(environment.rendezvous_host, environment.rendezvous_port or 9)
            server = HolderServer(self._held, key, host, self._copies)
        except OSError as error:
            return GivenState(0, False, f"no port to give the state from: {first_line(error)}")
        is_taken, reason = False, ""
        try:
            self._publish_and_wait(key, server)
            is_taken, reason = True, "all ranks have their state"
        except _StoppedError:
            reason = "stopped"
        except (dist.DistError, OSError) as error:
            reason = "stopped" if self._is_stopped else first_line(error)
        finally:
            server.close()
            self._close_store()
        _log.info("this process gave its state", bytes=server.bytes_given, files=server.files_given, end=reason)
        return GivenState(server.bytes_given, is_taken, reason)

    def _publish_and_wait(self, key: MeetingKey, server: HolderServer) -> None:
        environment = self._environment
        served = RendezvousStore(environment.rendezvous_host, key, RENDEZVOUS_TIMEOUT, self._raise_if_stopped)
        with self._lock:
            self._store = served
        self._raise_if_stopped()
        store: Store = PrefixStore(store_prefix(environment), served)
        held = [inventory.model_copy(update={"address": server.address}) for inventory in server.inventories]
        store.set(inventory_key(self._held.inventory.rank), encode_inventories(held))
        while True:
            self._raise_if_stopped()
            with suppress(dist.DistStoreError):
                store.wait([DONE_KEY], _LOOK_S)
                return

    def _raise_if_stopped(self) -> None:
        if self._is_stopped:
            raise _StoppedError

    def _close_store(self) -> None:
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()
            let_go(store)


def send_chunk(connection: socket.socket, chunk: Sequence[memoryview]) -> int:
    """Sends a chunk after its header; its size. Raises OSError."""
    size = sum(map(len, chunk))
    _send_parts(connection, [memoryview(CHUNK_HEADER.pack(size, sum_chunk(chunk))), *chunk])
    return size


def _send_parts(connection: socket.socket, parts: list[memoryview]) -> None:
    """Sends all of `parts` without joining them. Raises OSError."""
    first = 0
    while first < len(parts):
        sent = connection.sendmsg(parts[first : first + _MOST_PARTS])
        while sent:
            size = len(parts[first])
            if sent < size:
                parts[first] = parts[first][sent:]
                break
            sent -= size
            first += 1


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
