"""The memory files that this agent keeps for workers (memfd_create(2)).

A file has its size from the beginning, and can neither grow nor shrink. The worker that fills it seals it against
writing, so that its readers can trust what they have checked.

The next process of the agent gets the files in one of two ways. When this one is replaced on SIGUSR2 (execve), the
descriptors stay open, and `VARUNA_AGENT_MEMORY` says which they are. Under systemd, whose file descriptor store keeps
them over a restart of the service (FileDescriptorStoreMax), they come as sd_listen_fds(3) describes.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import NamedTuple

import psutil
import structlog

from varuna_agent.state import WorkerKey
from varuna_proto.group_memory import read_group_memory

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_INHERITED = "VARUNA_AGENT_MEMORY"
_FIRST_LISTEN_FD = 3
_SIZE_SEALS = getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SHRINK", 0)
_ALL_SEALS = _SIZE_SEALS | getattr(fcntl, "F_SEAL_WRITE", 0)


class NoRoomError(Exception):
    """There is no memory for the file; the text says why."""


class KeptFile(NamedTuple):
    """A file that an earlier process of this agent has kept."""

    key: WorkerKey
    step: int
    bytes: int


class MemoryFiles:
    """Args:
    limit_bytes: of all files together.
    notify_socket: systemd's, of a service with a file descriptor store; empty: there is none.
    """

    def __init__(self, limit_bytes: int, notify_socket: str = "") -> None:
        self.limit_bytes = limit_bytes
        self._notify_socket = notify_socket
        self._by_key: dict[WorkerKey, tuple[str, int]] = {}
        """The name and the descriptor of each file that is complete."""
        self._reserved_bytes = 0

    @property
    def bytes(self) -> int:
        """Of all files, with those that are being filled."""
        return self._reserved_bytes + sum(os.fstat(file).st_size for _, file in self._by_key.values())

    def make_file(self, size: int) -> int:
        """An empty file for a worker; end it with `keep_file` or `drop_file`. Raises NoRoomError, OSError."""
        free_bytes = self.limit_bytes - self.bytes
        if size > free_bytes:
            raise NoRoomError(
                f"{size} bytes of state do not fit: {max(free_bytes, 0)} are free of the {self.limit_bytes} that "
                "may be kept on this VM (varuna agent --memory-part)"
            )
        file = os.memfd_create("varuna-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except BaseException:
            os.close(file)
            raise
        self._reserved_bytes += size
        return file

    def keep_file(self, file: int, key: WorkerKey, step: int) -> int:
        """The worker has filled the file; returns its bytes. Raises ValueError, and drops it, if it is not sealed."""
        if not is_sealed(file):
            self.drop_file(file)
            raise ValueError("the file is not sealed")
        size = os.fstat(file).st_size
        self._reserved_bytes -= size
        self.free_file(key)
        self._by_key[key] = (_make_name(key, step), file)
        return size

    def drop_file(self, file: int) -> None:
        """The worker does not fill the file."""
        self._reserved_bytes -= os.fstat(file).st_size
        os.close(file)

    def get_file(self, key: WorkerKey) -> int | None:
        """The descriptor, which stays this object's."""
        kept = self._by_key.get(key)
        return None if kept is None else kept[1]

    def free_file(self, key: WorkerKey) -> None:
        name, file = self._by_key.pop(key, ("", -1))
        if file >= 0:
            os.close(file)
            self._notify_store(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        for _, file in self._by_key.values():
            os.close(file)
        self._by_key.clear()

    # ------------------------------------------------------------ from one process of the agent to the next

    def leave_to_store(self) -> None:
        """Give all files to systemd's file descriptor store, if there is one."""
        for name, file in self._by_key.values():
            self._notify_store(f"FDSTORE=1\nFDNAME={name}", file)

    def leave_to_successor(self, environ: MutableMapping[str, str]) -> None:
        """Let a program that replaces this process have the files; `environ`: its environment."""
        for _, file in self._by_key.values():
            os.set_inheritable(file, True)
        environ[_INHERITED] = ",".join(f"{file}:{name}" for name, file in self._by_key.values())

    def adopt_files(self, environ: MutableMapping[str, str]) -> list[KeptFile]:
        """Take what an earlier process of this agent has left to this one, once."""
        adopted: list[KeptFile] = []
        for file, name in _list_inherited(environ):
            kept = _read_name(name)
            if kept is None or not is_sealed(file):
                with suppress(OSError):
                    os.close(file)
                continue
            os.set_inheritable(file, False)
            key, step = kept
            self._by_key[key] = (name, file)
            adopted.append(KeptFile(key, step, os.fstat(file).st_size))
        return adopted

    def _notify_store(self, text: str, file: int | None = None) -> None:
        if not self._notify_socket:
            return
        address = self._notify_socket
        address = f"\0{address[1:]}" if address.startswith("@") else address
        files = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                connection.connect(address)
                connection.sendmsg([text.encode()], files)
        except OSError as error:
            _log.warning("systemd's file descriptor store cannot be reached", error=str(error))


def choose_limit(part: float) -> int:
    """The bytes that make this part of the VM's memory, or of what the agent's control groups have of it; 0 where the
    system has no memory files."""
    group, total = read_group_memory(), psutil.virtual_memory().total
    return int(part * (total if group is None else min(total, group.limit))) if hasattr(os, "memfd_create") else 0


def is_sealed(file: int) -> bool:
    """Whether this is a memory file that nobody can change."""
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & _ALL_SEALS == _ALL_SEALS
    except OSError:
        return False


def _make_name(key: WorkerKey, step: int) -> str:
    """As systemd takes it: no colon, at most 255 characters. A job's id may have dots."""
    return f"{key.job_id}.{key.generation}.{key.rank}.{step}"


def _read_name(name: str) -> tuple[WorkerKey, int] | None:
    """The inverse of `_make_name`; None for any other name."""
    job_id, *numbers = name.rsplit(".", 3)
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return None
    generation, rank, step = map(int, numbers)
    return WorkerKey(job_id, generation, rank), step


def _list_inherited(environ: MutableMapping[str, str]) -> list[tuple[int, str]]:
    """Descriptors and their names. The variables are removed, because workers inherit the agent's."""
    inherited = [each.partition(":") for each in environ.pop(_INHERITED, "").split(",") if each]
    listed = [(int(file), name) for file, _, name in inherited if file.isdecimal()]
    if environ.get("LISTEN_PID") == str(os.getpid()):
        names = environ.get("LISTEN_FDNAMES", "").split(":")
        count = _read_count(environ)
        listed += list(zip(range(_FIRST_LISTEN_FD, _FIRST_LISTEN_FD + count), names, strict=False))
        for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
            environ.pop(variable, None)
    return listed


def _read_count(environ: Mapping[str, str]) -> int:
    text = environ.get("LISTEN_FDS", "")
    return int(text) if text.isdecimal() else 0
