"""Unpacks a job's archive as the job's user; run as

    python -I -S unpack.py LIFE_FD STATUS_FD USER GROUP FOLDER ARCHIVE_FD

This process is a guard (see `guard.py`) without a command: its child changes to the job's user, then reads the archive.
So an archive that exploits a defect in this code can do no more than the job itself. For an archive that is refused,
the last line of the output has the reason.

The child makes plain files, folders, and links that stay inside. It makes each name once, in a folder that it made
itself; a name never leads through a link. Standard library only.
"""

from __future__ import annotations

import gzip
import os
import resource
import sys
import tarfile
import zlib
from pathlib import Path
from typing import IO, NoReturn

MOST_MEMBERS = 250_000
MOST_UNPACKED_BYTES = 4 * 1024**3
MOST_NAME_BYTES = 1024
"""Of a whole path; each part may have 255."""
MOST_DEPTH = 64
_MOST_READ_BYTES = 1024**2
"""Of one read; `tarfile` reads a header with a long name or other attributes as a whole."""
_MOST_TAR_BYTES = MOST_UNPACKED_BYTES + MOST_MEMBERS * 4096
"""Of the whole tar, because a small archive can expand to any number of headers."""
_MOST_MEMORY_BYTES = 1024**3
_MOST_CPU_S = 900
_MOST_TIME_S = 2**32


class ArchiveRefusedError(Exception):
    """The archive is not unpacked; the text says why."""


def main(arguments: list[str]) -> None:
    sys.path.append(str(Path(__file__).parents[2]))  # last: nothing there may hide a module of the standard library
    from varuna_agent.workers.guard import fork_worker

    life_fd, status_fd, user, group, folder, archive_fd = arguments
    fork_worker(int(life_fd), int(status_fd), user, group)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    try:
        os.chdir(folder)
        with os.fdopen(int(archive_fd), "rb") as file:
            file.seek(0)
            unpack(file, Path())
    except (ArchiveRefusedError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def unpack(packed: IO[bytes], folder: Path) -> None:
    """Unpack a .tar.gz into a folder that is empty. Raises ArchiveRefusedError, OSError."""
    tar = _Tar(packed)
    content = _Content(folder)
    try:
        with tarfile.TarFile(fileobj=tar) as archive:  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                content.add_member(member, tar)
                archive.members.clear()  # type: ignore[attr-defined] # it would keep them all
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, ArithmeticError) as error:
        raise ArchiveRefusedError(f"it is not a .tar.gz: {error}") from error
    except (MemoryError, RecursionError) as error:
        raise ArchiveRefusedError(f"its headers take too much memory: {type(error).__name__}") from error


class _Tar:
    """What is in the .gz, as `tarfile` reads it: forwards only, in pieces, and only so much of it."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._file = gzip.GzipFile(fileobj=packed)
        self._at = 0

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_READ_BYTES:
            raise ArchiveRefusedError(f"it has a header of {size} bytes: the longest may have {_MOST_READ_BYTES}")
        data = self._file.read(size)
        self._at += len(data)
        if self._at > _MOST_TAR_BYTES:
            raise ArchiveRefusedError(f"it unpacks to more than {_MOST_TAR_BYTES} bytes, headers included")
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> None:
        if offset < self._at:
            raise ArchiveRefusedError("it has a header with a size below 0")
        while self._at < offset:
            if not self.read(min(offset - self._at, _MOST_READ_BYTES)):
                return


class _Content:
    """The files, folders and links that an archive has brought so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders = {""}
        self._others: set[str] = set()
        self._members = 0
        self._bytes = 0

    def add_member(self, member: tarfile.TarInfo, tar: _Tar) -> None:
        """`tar` stands where the member's data begin. Raises ArchiveRefusedError, OSError."""
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise ArchiveRefusedError(f"it has more than {MOST_MEMBERS} members: pack them into fewer files")
        parts = parts_of(member.name)
        name = "/".join(parts)
        if member.isdir():
            self._add_folders(parts)
            return
        self._add_folders(parts[:-1])
        if not name or name in self._folders or name in self._others:
            _refuse(member, "comes twice, or is the folder itself")
        self._others.add(name)
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            self._add_file(member, name, tar)
        elif member.issym():
            check_link(member, depth=len(parts) - 1)
            (self._folder / name).symlink_to(member.linkname)
        else:
            kind = "a hard link" if member.islnk() else "neither a file nor a folder nor a symbolic link"
            _refuse(member, f"is {kind}: such do not come along")

    def _add_folders(self, parts: tuple[str, ...]) -> None:
        for end in range(1, len(parts) + 1):
            name = "/".join(parts[:end])
            if name in self._folders:
                continue
            if name in self._others:
                raise ArchiveRefusedError(f"{_shown(name)} is a folder and something else as well")
            self._folders.add(name)
            (self._folder / name).mkdir()

    def _add_file(self, member: tarfile.TarInfo, name: str, tar: _Tar) -> None:
        self._bytes += member.size
        if member.size < 0 or self._bytes > MOST_UNPACKED_BYTES:
            raise ArchiveRefusedError(f"it unpacks to more than {MOST_UNPACKED_BYTES} bytes")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._folder / name, flags, 0o600), "wb") as file:
            left = member.size
            while left:
                data = tar.read(min(left, _MOST_READ_BYTES))
                if not data:
                    raise ArchiveRefusedError(f"it ends within {_shown(name)}")
                file.write(data)
                left -= len(data)
            file.flush()
            os.fchmod(file.fileno(), 0o755 if member.mode & 0o100 else 0o644)
            if 0 <= member.mtime < _MOST_TIME_S:
                os.utime(file.fileno(), (member.mtime, member.mtime))


def parts_of(name: str) -> tuple[str, ...]:
    """Of a member's name. Raises ArchiveRefusedError for one that leads outside, or is too long or too deep."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts:
        raise ArchiveRefusedError(f"{_shown(name)} leads out of the folder")
    if len(os.fsencode(name)) > MOST_NAME_BYTES or len(parts) > MOST_DEPTH:
        raise ArchiveRefusedError(
            f"{_shown(name)} is too long or too deep: names may have {MOST_NAME_BYTES} bytes and {MOST_DEPTH} folders"
        )
    return parts


def check_link(member: tarfile.TarInfo, depth: int) -> None:
    """Raises ArchiveRefusedError for a target that may lie outside.

    Only at its beginning may a target go up, and no higher than the `depth` folders above the link. These are real
    folders, since no name leads through a link. From there it only goes down: by names, or by other links like it.
    """
    target = member.linkname
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    if not target or target.startswith("/") or ups > depth or ".." in parts[ups:]:
        _refuse(
            member, f"is a link to {_shown(target)}, which may lie outside: link to a relative path within the folder"
        )
    if len(os.fsencode(target)) > MOST_NAME_BYTES:
        _refuse(member, f"is a link to a name of more than {MOST_NAME_BYTES} bytes")


def _refuse(member: tarfile.TarInfo, why: str) -> NoReturn:
    raise ArchiveRefusedError(f"{_shown(member.name)} {why}")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 100 else f"{name[:50]}...{name[-50:]}")


if __name__ == "__main__":
    main(sys.argv[1:])
