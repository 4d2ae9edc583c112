"""Memory files: what a process holds, in memory that its agent keeps and that outlives the process.

The agent makes the file (a memfd) with the size that the worker asks for. The worker fills and seals it, so that nobody
can change it afterwards, and ends. A worker of the next generation on that VM maps the file, and gives its contents to
all ranks as the ended process would have.

A file has the length of the inventory (eight bytes, little-endian), the inventory, and then the inventory's files in
its order, without gaps.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence

import structlog

from varuna.checkpoint.errors import CheckpointError
from varuna.diagnostics.error_text import first_line
from varuna.holdings.giving import HolderSession
from varuna.holdings.inventory import HeldFile, HeldFiles, decode_inventory, encode_inventory
from varuna_proto import framing
from varuna_proto.environment import WorkerEnvironment, memory_socket
from varuna_proto.v1 import worker_pb2

__all__ = [
    "MemoryGivers",
    "MemoryRefusedError",
    "fill_memory_file",
    "list_pieces",
    "map_memory_file",
    "store_in_memory",
    "take_memory_files",
]

_log = structlog.get_logger("varuna")

_LENGTH = struct.Struct("<Q")
_MOST_PARTS = 512
"""Of one system call; Linux takes 1024."""
_MOST_FILES = 64
"""In one answer of the agent; Linux passes 253 descriptors at once."""
_ANSWER_S = 30.0
_RETRY_S = 0.5


class MemoryRefusedError(Exception):
    """The agent gives no memory file; the text says why."""


def store_in_memory(held: HeldFiles, environment: WorkerEnvironment) -> int:
    """Puts what this process holds into a memory file, which the agent keeps from then on; returns its bytes.

    `environment`: of this process, with the generation's secret. Raises MemoryRefusedError, OSError.
    """
    pieces = list_pieces(held)
    size = sum(map(len, pieces))
    with _connect(environment) as connection:
        (file,) = _ask(connection, environment, store_bytes=size)
        try:
            fill_memory_file(file, pieces)
        finally:
            os.close(file)
        connection.sendall(framing.frame(worker_pb2.StateStored(step=held.inventory.step)))
        _receive_grant(connection)
    return size


def take_memory_files(environment: WorkerEnvironment) -> list[HeldFiles]:
    """What workers that have ended on this VM left for this generation, mapped. Never raises: the job goes on without.

    `environment`: of this process, with the generation's secret.
    """
    taken: list[HeldFiles] = []
    try:
        with _connect(environment) as connection:
            files = _ask(connection, environment, store_bytes=0)
    except FileNotFoundError:  # the agent keeps no memory files
        return []
    except (MemoryRefusedError, OSError) as error:
        _log.warning("the memory of workers that have ended cannot be had", reason=first_line(error))
        return []
    for file in files:
        try:
            taken.append(map_memory_file(file))
        except (CheckpointError, OSError, ValueError) as error:
            _log.warning("the memory of a worker that has ended is of no use", reason=first_line(error))
        finally:
            os.close(file)
    return taken


def list_pieces(held: HeldFiles) -> list[memoryview]:
    """The contents of the memory file, without a copy of the state."""
    inventory = encode_inventory(held.inventory)
    files = [held.files[entry.name] for entry in held.inventory.receipt.files]
    return [memoryview(_LENGTH.pack(len(inventory)) + inventory), *(piece for file in files for piece in file.pieces)]


def fill_memory_file(file: int, pieces: Sequence[memoryview]) -> None:
    """Writes all pieces, and seals the file, which has their size. Raises OSError."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        written = os.writev(file, left[:_MOST_PARTS])
        while written:
            size = len(left[0])
            if written < size:
                left[0] = left[0][written:]
                break
            written -= size
            del left[0]
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def map_memory_file(file: int) -> HeldFiles:
    """The contents of a sealed memory file, mapped. Raises CheckpointError for another one's; OSError, ValueError."""
    view = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
    if len(view) < _LENGTH.size:
        raise CheckpointError("a memory file is too short")
    end = _LENGTH.size + _LENGTH.unpack(view[: _LENGTH.size])[0]
    inventory = decode_inventory(bytes(view[_LENGTH.size : end]), "the inventory of a memory file")
    files: dict[str, HeldFile] = {}
    for entry in inventory.receipt.files:
        piece = view[end : end + entry.bytes]
        if len(piece) < entry.bytes:
            raise CheckpointError(f"a memory file ends within {entry.name}")
        files[entry.name] = HeldFile(entry.bytes, (piece,))
        end += entry.bytes
    return HeldFiles(inventory, files)


class MemoryGivers:
    """Threads that give the contents of memory files to the ranks of a generation, this one among them."""

    def __init__(self, taken: Iterable[HeldFiles], environment: WorkerEnvironment) -> None:
        """`environment`: of this process, with the generation's secret."""
        self._is_over = threading.Event()
        self._sessions: list[HolderSession] = []
        for held in taken:
            thread = threading.Thread(target=self._give, args=(held, environment), name="varuna-memory", daemon=True)
            thread.start()

    def close(self) -> None:
        """Ends them, when all ranks have the state or this one needs none."""
        self._is_over.set()
        for session in list(self._sessions):
            session.stop()

    def _give(self, held: HeldFiles, environment: WorkerEnvironment) -> None:
        while not self._is_over.is_set():
            session = HolderSession(held, environment)
            self._sessions.append(session)
            if self._is_over.is_set() or session.give_state().is_taken:
                return
            time.sleep(_RETRY_S)  # rank 0 has not come yet


def _connect(environment: WorkerEnvironment) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(memory_socket(environment.agent_socket))
    except BaseException:
        connection.close()
        raise
    return connection


def _ask(connection: socket.socket, environment: WorkerEnvironment, *, store_bytes: int) -> list[int]:
    """Sends the request; returns the descriptors of the files. Raises MemoryRefusedError, OSError."""
    request = worker_pb2.MemoryRequest(
        job_id=environment.job_id,
        generation=environment.generation,
        rank=environment.rank,
        secret=environment.secret,
        store_bytes=store_bytes,
    )
    connection.sendall(framing.frame(request))
    first, files, _, _ = socket.recv_fds(connection, 1, _MOST_FILES)
    try:
        _receive_grant(connection, first)
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return files


def _receive_grant(connection: socket.socket, first: bytes | None = None) -> None:
    """The agent's answer. `first`: the byte of it that has been received. Raises MemoryRefusedError, OSError."""
    first = connection.recv(1) if first is None else first
    if not first:
        raise ConnectionError("the agent has closed the connection")
    # The byte came before the length, and only carries the descriptors.
    granted = framing.receive(connection, worker_pb2.MemoryGranted)
    if granted is None:
        raise ConnectionError("the agent has closed the connection")
    if granted.refusal:
        raise MemoryRefusedError(granted.refusal)
