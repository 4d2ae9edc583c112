"""Packs a job's workdir, so that every VM gets the same files. Files that git ignores are left out."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pathspec import GitIgnoreSpec

from varuna_client.errors import UserError

MOST_BYTES = 256 * 1024 * 1024
"""The largest archive that the manager accepts."""
_MOST_UNPACKED_BYTES = 4 * 1024**3
_MOST_MEMBERS = 250_000
_MOST_NAME_BYTES = 1024
_MOST_DEPTH = 64
"""These four as agents unpack (`varuna_agent.folders.unpack`), which would refuse the archive on each VM."""
_IGNORE_FILES = (".gitignore", ".varunaignore")
_ALWAYS_IGNORED = GitIgnoreSpec.from_lines([".git/", "__pycache__/", ".venv/"])
_LARGEST_SHOWN = 3
_MANAGER_FILES = ("manager.lock", "manager.db.lock", "manager.db")
"""Files that identify a manager's data directory, which contains keys and other jobs' workdirs."""


@dataclass(frozen=True)
class Packed:
    sha256: str
    total_bytes: int
    files: int
    left_out: tuple[str, ...] = ()
    """Files that no ignore rule names but that are not packed, each with the reason."""


def pack(folder: Path, out: IO[bytes]) -> Packed:
    """Write the folder as .tar.gz. The same files always give the same bytes.

    Left out are files that `.gitignore` and `.varunaignore` name (also those of the repository around the folder),
    `.git`, `__pycache__` and `.venv`, and what `Packed.left_out` lists: sockets, pipes, devices, a manager's data
    directory. Raises UserError for a folder that is too large, cannot be read, has links to files outside, or is a
    manager's data directory itself.
    """
    if _is_manager_data(folder):
        raise UserError(
            f"workdir {folder} is a manager's data directory, with its keys: give the job a workdir of its own, or "
            "move the manager's --data-dir"
        )
    left_out: list[str] = []
    digest = _HashingWriter(out)
    try:
        entries = list(_list_entries(folder, left_out))
        sizes = {path: path.stat().st_size for path in entries if path.is_file() and not path.is_symlink()}
        if sum(sizes.values()) > _MOST_UNPACKED_BYTES:
            raise UserError(_describe_excess(folder, sizes, sum(sizes.values()), _MOST_UNPACKED_BYTES))
        _check_names(folder, entries)
        with (
            # gzip's header gets no name and no time; `_add_entry` sets the times and owners of the files.
            gzip.GzipFile(filename="", mode="wb", fileobj=digest, mtime=0, compresslevel=6) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in entries:
                _add_entry(archive, folder, path)
    except OSError as error:
        # Without `strerror`: a file has become shorter while it was read.
        reason = error.strerror or f"{error}: it changes"
        raise UserError(f"workdir {folder}: cannot pack {error.filename or folder}: {reason}") from error
    if digest.total_bytes > MOST_BYTES:
        raise UserError(_describe_excess(folder, sizes, digest.total_bytes, MOST_BYTES))
    return Packed(digest.hexdigest(), digest.total_bytes, len(sizes), tuple(left_out))


def _describe_excess(folder: Path, sizes: dict[Path, int], total: int, most: int) -> str:
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_LARGEST_SHOWN]
    named = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:.0f} MiB)" for path in largest)
    return (
        f"workdir {folder} has {total / 2**20:.0f} MiB, more than {most // 2**20}: name what the job does not need in "
        f".varunaignore, and read data from a URL (largest: {named})"
    )


def _check_names(folder: Path, entries: Sequence[Path]) -> None:
    """Raises UserError for what no agent unpacks."""
    if len(entries) > _MOST_MEMBERS:
        largest = Counter(path.relative_to(folder).parts[0] for path in entries).most_common(1)[0]
        raise UserError(
            f"workdir {folder} has {len(entries)} files and folders, more than {_MOST_MEMBERS}: name what the job does "
            f"not need in .varunaignore, and read data from a URL (most are in {largest[0]})"
        )
    for path in entries:
        name = path.relative_to(folder)
        if len(os.fsencode(name)) > _MOST_NAME_BYTES or len(name.parts) > _MOST_DEPTH:
            raise UserError(
                f"workdir {folder}: {str(name)[:80]}... is too long or too deep: names may have {_MOST_NAME_BYTES} "
                f"bytes and {_MOST_DEPTH} folders; name it in .varunaignore, or shorten it"
            )


def _add_entry(archive: tarfile.TarFile, folder: Path, path: Path) -> None:
    info = archive.gettarinfo(path, arcname=path.relative_to(folder).as_posix())
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
    if info.issym() and not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"workdir {folder}: {path.relative_to(folder)} is a link to {path.resolve()}, outside: copy it")
    if info.issym():
        info.linkname = _make_link_relative(info.linkname, path, depth=info.name.count("/"))
    if info.islnk():  # a hard link: stored as a whole file, independent of the first one
        info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
    if info.isreg():
        with path.open("rb") as file:
            archive.addfile(info, file)
    elif info.isdir() or info.issym():
        archive.addfile(info)


def _make_link_relative(target: str, link: Path, *, depth: int) -> str:
    """The target in the form that agents accept: relative, `..` only at its start, and at most `depth` of them."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    if target.startswith("/") or ups > depth or ".." in parts[ups:]:
        return os.path.relpath(link.resolve(), link.parent.resolve())
    return target


def _list_entries(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """Everything that is not ignored, sorted by name, folders before their contents."""
    root = folder.resolve()
    rules = [
        (above, spec)
        for above in reversed(_list_repository_folders(root))
        if (spec := _load_ignore_spec(above)) is not None
    ]
    for shown in _walk_folder(root, folder, rules):
        if (reason := _find_obstacle(shown)) is None:
            yield shown
        else:
            left_out.append(f"{shown.relative_to(folder)} ({reason})")


def _walk_folder(real: Path, shown: Path, rules: list[tuple[Path, GitIgnoreSpec]]) -> Iterator[Path]:
    spec = _load_ignore_spec(real)
    rules = [*rules, (real, spec)] if spec is not None else rules
    try:
        entries = sorted(shown.iterdir())
    except OSError as error:
        raise UserError(f"workdir: cannot read {shown}: {error.strerror}") from error
    for entry in entries:
        is_folder = entry.is_dir() and not entry.is_symlink()
        if _is_ignored(real / entry.name, rules, is_folder=is_folder):
            continue
        yield entry
        if is_folder and not _is_manager_data(entry):
            yield from _walk_folder(real / entry.name, entry, rules)


def _find_obstacle(path: Path) -> str | None:
    """Why the file cannot be copied to a VM; None: it can."""
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        return "a manager's data directory" if _is_manager_data(path) else None
    if stat.S_ISLNK(mode) and _is_circular(path):
        return "a link that leads to itself"
    for is_kind, kind in (
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISCHR, "a device"),
    ):
        if is_kind(mode):
            return kind
    return None


def _is_circular(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _is_manager_data(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MANAGER_FILES)


def _is_ignored(path: Path, rules: list[tuple[Path, GitIgnoreSpec]], *, is_folder: bool) -> bool:
    """As in git, the matching rule nearest to the file decides."""
    suffix = "/" if is_folder else ""
    if _ALWAYS_IGNORED.match_file(path.name + suffix):
        return True
    for base, spec in reversed(rules):
        is_ignored = spec.check_file(path.relative_to(base).as_posix() + suffix).include
        if is_ignored is not None:
            return is_ignored
    return False


def _load_ignore_spec(folder: Path) -> GitIgnoreSpec | None:
    lines = [line for name in _IGNORE_FILES if (folder / name).is_file() for line in _read_lines(folder / name)]
    if not lines:
        return None
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError:
        return GitIgnoreSpec.from_lines([line for line in lines if _is_pattern(line)])


def _is_pattern(line: str) -> bool:
    """As for git, a malformed pattern names no file."""
    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _list_repository_folders(folder: Path) -> list[Path]:
    """The folders above it up to the repository's root; none outside of a repository."""
    if (folder / ".git").exists():
        return []
    above = []
    for parent in folder.parents:
        above.append(parent)
        if (parent / ".git").exists():
            return above
    return []


class _HashingWriter:
    """Passes writes on, counting and hashing their bytes."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._sha256 = hashlib.sha256()
        self.total_bytes = 0

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self.total_bytes += len(data)
        return self._out.write(data)

    def flush(self) -> None:
        self._out.flush()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()
