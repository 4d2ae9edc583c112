"""A rank of the new generation takes files from the memories of holders."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import structlog
from torch import Tensor

from varuna.checkpoint.errors import CheckpointError, HolderError
from varuna.checkpoint.format import tensor_file
from varuna.checkpoint.format.manifest import FileEntry
from varuna.checkpoint.loading.reader import FileContent
from varuna.checkpoint.storage.store import allocate_aligned
from varuna.checkpoint.storage.windows import map_ahead
from varuna.diagnostics.error_text import first_line
from varuna.diagnostics.loading_progress import LOADING_PROGRESS
from varuna.distributed.handshake import MeetingKey, greet_server
from varuna.distributed.rendezvous_protocol import AnswerStatus, pack_message, receive_into, receive_message
from varuna.holdings.inventory import HeldFile, Inventory
from varuna.holdings.merging import MergedInventories
from varuna.holdings.transfer_protocol import (
    CHUNK_BYTES,
    CHUNK_HEADER,
    FETCH,
    LARGEST_MESSAGE_BYTES,
    NUMBER,
    SILENCE_S,
    sum_chunk,
)

__all__ = ["HeldStateReader", "connect_to_server", "receive_chunk"]

_log = structlog.get_logger("varuna")

_CONNECT_S = 5.0
_CHUNK_S = 30.0
"""A chunk that takes longer is a fault: the holder, or the way to it, is too slow to wait for."""
_ATTEMPTS = 2
"""At one holder: a connection may break though the process is there."""
_FEWEST_AHEAD = 2
_MOST_AHEAD = 4
"""Files in memory at once: one is copied into place, the others are on their way."""


class HeldStateReader:
    """Reads the files of a state that several holders have. A `ContentReader`.

    `plan`: the rank of the holder for each file; a file without one comes from any that has it, and so does a file
    whose holder fails. `ahead`: files that are here already. Errors are HolderErrors, which name the holders.
    """

    store_bytes = 0

    def __init__(
        self,
        merged: MergedInventories,
        plan: Mapping[str, int],
        key: MeetingKey,
        host: str,
        ahead: Mapping[str, HeldFile] = MappingProxyType({}),
    ) -> None:
        """`host`: this machine's address, whose holders come first."""
        self._merged = merged
        self._ahead = ahead
        self._plan = plan
        self._key = key
        self._host = host
        self._lock = threading.Lock()
        self._idle: dict[int, list[socket.socket]] = {}
        self._faults: dict[int, str] = {}
        """By holder: why it is no longer asked."""
        self._outlines: dict[str, FileContent] = {}
        self.bytes_read = 0
        self.givers: set[int] = set()
        """The ranks of the holders that have given a file."""

    @property
    def peer_bytes(self) -> int:
        return self.bytes_read

    @property
    def where(self) -> str:
        return f"the state of step {self._merged.manifest.step} in the memories of other processes"

    def url_of(self, entry: FileEntry) -> str:
        return f"{entry.name} of {self.where}"

    def verify_files(self, entries: Iterable[FileEntry]) -> None:
        """Checks the files' headers, which came with the inventories. Contents are verified as they come."""
        for entry in entries:
            self.read_outline(entry)

    def read_outline(self, entry: FileEntry) -> FileContent:
        outline = self._outlines.get(entry.name)
        if outline is None:
            outline = self._outlines[entry.name] = self._merged.holders[entry.name][0].read_outline(entry)
        return outline

    def read_contents(self, entries: Iterable[FileEntry]) -> Iterator[tuple[FileEntry, FileContent]]:
        """Each file, in an order in which several holders give at the same time."""
        by_name = {entry.name: entry for entry in entries}
        for name, entry in by_name.items():
            if name in self._ahead:
                (data,) = self._ahead[name].pieces
                yield entry, FileContent(*tensor_file.read_tensors(data))
        wanted = self._interleave_holders([entry for name, entry in by_name.items() if name not in self._ahead])
        ahead = min(max(len({self._find_candidates(one)[0].rank for one in wanted}), _FEWEST_AHEAD), _MOST_AHEAD)
        if wanted:
            yield from zip(wanted, map_ahead(self._fetch_content, wanted, ahead=ahead), strict=True)

    def read_beside(self, inventory: Inventory, name: str, size: int) -> dict[str, Tensor]:
        """The tensors of a file of `size` bytes that a holder gives beside its state. Raises HolderError."""
        try:
            return tensor_file.read_tensors(self._fetch_file(inventory, name, size))[0]
        except (OSError, ValueError, struct.error) as error:
            raise HolderError(_describe_failure(inventory, name, error), (inventory.rank,)) from error

    def close(self) -> None:
        """Closes the connections to the holders."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in (connection for connections in idle.values() for connection in connections):
            connection.close()

    def _interleave_holders(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        """The first file of each holder, then the second of each, and so on."""
        place: dict[int, int] = {}
        numbered: list[tuple[int, FileEntry]] = []
        for entry in entries:
            holder = self._find_candidates(entry)[0].rank
            place[holder] = place.get(holder, 0) + 1
            numbered.append((place[holder], entry))
        return [entry for _, entry in sorted(numbered, key=lambda one: one[0])]

    def _find_candidates(self, entry: FileEntry) -> list[Inventory]:
        """The holders of a file, the planned one first, and then those on this machine."""
        planned = self._plan.get(entry.name)
        return sorted(
            self._merged.holders[entry.name],
            key=lambda inventory: (inventory.rank != planned, inventory.host != self._host, inventory.rank),
        )

    def _fetch_content(self, entry: FileEntry) -> FileContent:
        candidates = self._find_candidates(entry)
        for inventory in candidates:
            if inventory.rank in self._faults:
                continue
            try:
                data = self._fetch_file(inventory, entry.name, entry.bytes)
            except (OSError, ValueError, struct.error, MemoryError) as error:
                self._record_fault(inventory, entry, error)
                continue
            with self._lock:
                self.bytes_read += entry.bytes
                self.givers.add(inventory.rank)
            try:
                return FileContent(*tensor_file.read_tensors(data))
            except ValueError as error:
                raise CheckpointError(f"{self.url_of(entry)} is not a safetensors file: {error}") from error
        ranks = tuple(inventory.rank for inventory in candidates)
        raise HolderError("; ".join(self._faults[rank] for rank in ranks), ranks)

    def _record_fault(self, inventory: Inventory, entry: FileEntry, error: Exception) -> None:
        fault = _describe_failure(inventory, entry.name, error)
        with self._lock:
            is_first = self._faults.setdefault(inventory.rank, fault) == fault
        if is_first:
            _log.warning("a process that holds state failed", rank=inventory.rank, reason=fault)

    def _fetch_file(self, inventory: Inventory, name: str, size: int) -> memoryview:
        """The file's bytes, verified. Raises OSError, ValueError."""
        data = allocate_aligned(size)
        at = 0
        for attempt in range(_ATTEMPTS):
            connection: socket.socket | None = None
            try:
                connection = self._take_connection(inventory)
                _request_file(connection, inventory, name, size, at)
                while at < size:
                    at += receive_chunk(connection, data[at:])
                    LOADING_PROGRESS.count_piece()
            except (OSError, ValueError, struct.error) as error:
                if connection is not None:
                    connection.close()
                if attempt == _ATTEMPTS - 1 or not isinstance(error, ConnectionError):
                    raise
            else:
                with self._lock:
                    self._idle.setdefault(inventory.rank, []).append(connection)
                break
        return data

    def _take_connection(self, inventory: Inventory) -> socket.socket:
        with self._lock:
            idle = self._idle.get(inventory.rank)
            if idle:
                return idle.pop()
        return connect_to_server(inventory.address, self._key)


def _describe_failure(inventory: Inventory, name: str, error: Exception) -> str:
    return (
        f"the process that was rank {inventory.rank}, at {inventory.address}, did not give {name}: "
        f"{first_line(error) or type(error).__name__}"
    )


def connect_to_server(address: str, key: MeetingKey) -> socket.socket:
    """A proven connection to the `StateServer` at `host:port`. Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), _CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet_server(connection, key, SILENCE_S)
        connection.settimeout(SILENCE_S)
    except BaseException:
        connection.close()
        raise
    return connection


def _request_file(connection: socket.socket, inventory: Inventory, name: str, size: int, offset: int) -> None:
    words = [NUMBER.pack(inventory.rank), NUMBER.pack(inventory.step), name.encode(), NUMBER.pack(offset)]
    connection.sendall(pack_message(FETCH, words))
    status, answer = receive_message(connection, LARGEST_MESSAGE_BYTES)
    if status != AnswerStatus.DONE or len(answer) != 1:
        raise ValueError(answer[0].decode(errors="replace") if answer else "it refused")
    (present,) = NUMBER.unpack(answer[0])
    if present != size:
        raise ValueError(f"it has {present} bytes of it instead of {size}")


def receive_chunk(connection: socket.socket, room: memoryview) -> int:
    """Receives the next chunk into the beginning of `room`, and verifies it; its size. Raises OSError, ValueError."""
    deadline_s = time.monotonic() + _CHUNK_S
    header = bytearray(CHUNK_HEADER.size)
    receive_into(connection, memoryview(header), deadline_s)
    size, checksum = CHUNK_HEADER.unpack(header)
    if not 0 < size <= min(CHUNK_BYTES, len(room)):
        raise ValueError(f"it sends a chunk of {size} bytes")
    chunk = room[:size]
    receive_into(connection, chunk, deadline_s)
    if sum_chunk([chunk]) != checksum:
        raise ValueError("a chunk of it came damaged")
    return int(size)
