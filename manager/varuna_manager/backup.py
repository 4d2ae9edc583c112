"""Backups: a manager's data directory and its SQLite store as one .tar.gz, made while the manager runs.

The store is copied through SQLite's own backup, which gives one moment of it however much is written meanwhile. Of the
data directory everything is taken (the authority's key, secrets, addresses, packed workdirs) but what is large and can
be made again or is elsewhere: folders of local VMs, checkpoints, compiled code. With PostgreSQL the store is pg_dump's.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sqlalchemy.engine import make_url

from varuna_manager.db.engine import Database
from varuna_manager.db.schema import known_revisions
from varuna_manager.settings import ManagerSettings

STORE = "manager.db"
_MANIFEST = "varuna-backup.json"
_LEFT_OUT = frozenset({"vms", "checkpoints", "numba"})
_OF_THE_PROCESS = (".lock", ".part", "-wal", "-shm", "-journal")
_PIECE = 1024 * 1024
_SUDDEN = (OSError, tarfile.TarError, EOFError, json.JSONDecodeError, UnicodeDecodeError)
"""What reading a file that is no backup, or half of one, raises."""


class BackupError(Exception):
    """`str()` is one line with the way out."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a backup has."""

    version: str
    """Of Varuna."""
    revision: str | None
    """Of the store's schema; None: the store is in PostgreSQL, and not in the backup."""
    files: dict[str, str]
    """SHA-256 by path."""
    left_out: list[str]


def save_backup(settings: ManagerSettings, file: Path) -> Contents:
    """Write the backup, whole or not at all, for its owner's eyes only. Raises BackupError."""
    data_dir = settings.data_dir.resolve()
    if not data_dir.is_dir():
        raise BackupError(f"there is no data directory {data_dir}: give the manager's --data-dir")
    if file.exists():
        raise BackupError(f"{file} is there already: choose another name, as each backup has its own")
    if file.resolve().is_relative_to(data_dir):
        raise BackupError(f"{file} is within the data directory, and would be lost with it: write it elsewhere")
    url = settings.database_url or f"sqlite:///{data_dir / STORE}"
    part = file.with_name(f"{file.name}.part")
    try:
        with _private(part) as out, tempfile.TemporaryDirectory(prefix=".varuna-backup-", dir=file.parent) as folder:
            revision, store = None, None
            if not Database.is_shared(url):
                store = Path(make_url(url).database or "").resolve()
                revision = _copy_store(store, Path(folder) / STORE)
            files, left_out = _files_to_save(settings, data_dir, store)
            if store is not None:
                files[STORE] = Path(folder) / STORE
            contents = _pack(out, files, left_out, revision)
            out.flush()
            os.fsync(out.fileno())
        part.rename(file)
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"no backup was written to {file}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return contents


def restore_backup(file: Path, data_dir: Path) -> Contents:
    """Make the data directory of a manager from a backup. Raises BackupError, and leaves nothing behind then."""
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise BackupError(f"{data_dir} is not empty: move away what is there, and end its manager, or give another")
    is_new = not data_dir.exists()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".varuna-restore-", dir=data_dir) as name:
            contents = _unpack(file, Path(name))
            _give_to(Path(name), data_dir)
            # The store comes last: without it no manager takes a half restored folder for its own.
            for path in sorted(Path(name).iterdir(), key=lambda path: path.name == STORE):
                path.rename(data_dir / path.name)
    except _SUDDEN as error:
        if is_new:
            shutil.rmtree(data_dir, ignore_errors=True)
        raise BackupError(f"{file} cannot be restored to {data_dir}: {error}") from error
    except BackupError:
        if is_new:
            shutil.rmtree(data_dir, ignore_errors=True)
        raise
    return contents


# ---------------------------------------------------------------- saving


def _copy_store(source: Path, copy: Path) -> str:
    """The revision of its schema."""
    if not source.is_file():
        raise BackupError(f"there is no store {source}: give --data-dir, or --database-url, of the manager")
    with _private(copy):
        pass
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)))
        target = stack.enter_context(contextlib.closing(sqlite3.connect(copy)))
        store.backup(target)  # all pages at one moment; whoever writes goes on in the WAL
        target.execute("PRAGMA journal_mode=DELETE")  # one file, with nothing beside it
        (verdict,) = target.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise BackupError(f"the store {source} is harmed ({verdict}): keep the backups of before")
        (revision,) = target.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(revision)


def _pack(out: IO[bytes], files: dict[str, Path], left_out: list[str], revision: str | None) -> Contents:
    sums: dict[str, str] = {}
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
        for name, path in sorted(files.items()):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may have gone meanwhile
                sums[name] = _add(tar, name, file, os.fstat(file.fileno()).st_size)
        version = importlib.metadata.version("varuna-spot")
        contents = Contents(version=version, revision=revision, files=sums, left_out=sorted(left_out))
        with tempfile.TemporaryFile() as manifest:
            size = manifest.write(json.dumps(asdict(contents), indent=1).encode())
            manifest.seek(0)
            _add(tar, _MANIFEST, manifest, size)
    return contents


def _files_to_save(settings: ManagerSettings, data_dir: Path, store: Path | None) -> tuple[dict[str, Path], list[str]]:
    """(file by its name in the backup, what is left out). `store`: which is saved otherwise."""
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for path in sorted(data_dir.iterdir()):
        if path.name in _LEFT_OUT:
            left_out.append(path.name)
        elif path.name != STORE and path.resolve() != store and not path.name.endswith(_OF_THE_PROCESS):
            files |= _plain_files(path.name, path.resolve(), left_out)
    pki_dir = None if settings.pki_dir is None else settings.pki_dir.resolve()
    if pki_dir is not None and not pki_dir.is_relative_to(data_dir):
        files |= _plain_files("pki", pki_dir, left_out)
    return files, left_out


def _plain_files(name: str, path: Path, left_out: list[str]) -> dict[str, Path]:
    """A file, or all those below a folder."""
    if path.is_dir():
        below: dict[str, Path] = {}
        for one in sorted(path.iterdir()):
            if one.is_symlink():
                left_out.append(f"{name}/{one.name} (a link)")
            else:
                below |= _plain_files(f"{name}/{one.name}", one, left_out)
        return below
    if path.is_file():
        return {name: path}
    left_out.append(f"{name} (no plain file)")
    return {}


def _add(tar: tarfile.TarFile, name: str, file: IO[bytes], size: int) -> str:
    """The SHA-256 of what was added."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    reader = _Summed(file)
    tar.addfile(entry, reader)
    return reader.sum.hexdigest()


class _Summed:
    """A file whose checksum is taken while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sum.update(data)
        return data


# ---------------------------------------------------------------- restoring


def _unpack(file: Path, folder: Path) -> Contents:
    found: dict[str, str] = {}
    manifest: dict[str, Any] | None = None
    with tarfile.open(file, "r:gz") as tar:
        for entry in tar:
            name = PurePosixPath(entry.name)
            data = tar.extractfile(entry) if entry.isreg() else None
            if data is None or name.is_absolute() or ".." in name.parts or "\0" in entry.name:
                raise BackupError(f"{file} has {entry.name!r}, which no backup of Varuna has: is it another file?")
            if entry.name == _MANIFEST:
                manifest = json.load(data)
                continue
            target = folder.joinpath(*name.parts)
            for below in reversed(target.relative_to(folder).parents[:-1]):
                (folder / below).mkdir(mode=0o700, exist_ok=True)
            with _private(target) as out:
                found[entry.name] = _copy(data, out)
    if manifest is None:
        raise BackupError(f"{file} is no backup of Varuna, or not whole: it has no {_MANIFEST}")
    try:
        contents = Contents(**manifest)
    except TypeError as error:
        raise BackupError(
            f"{file} has a {_MANIFEST} of another kind: restore it with the version that made it"
        ) from error
    if found != contents.files:
        wrong = sorted(name for name in {*found, *contents.files} if found.get(name) != contents.files.get(name))
        raise BackupError(f"{file} is harmed: {wrong[0]} is not what was saved; take another backup")
    if contents.revision is not None and contents.revision not in known_revisions():
        raise BackupError(
            f"{file} was made by Varuna {contents.version}, and this version does not know its store (revision "
            f"{contents.revision}): restore it with that version, or a later one"
        )
    return contents


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    summed = hashlib.sha256()
    while data := source.read(_PIECE):
        summed.update(data)
        target.write(data)
    target.flush()
    os.fsync(target.fileno())
    return summed.hexdigest()


def _give_to(folder: Path, data_dir: Path) -> None:
    """Root restores for the user whose folder it is."""
    if os.geteuid() == 0:
        owner = data_dir.stat()
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _private(path: Path) -> IO[bytes]:
    """A new file that only its owner reads."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")
