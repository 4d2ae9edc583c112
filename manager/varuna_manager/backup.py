"""Backups: a manager's data directory and its SQLite store as one .tar.gz, made while the manager runs.

SQLite's own backup copies the store as it is at one moment, even while others write. The backup has all of the data
directory (the authority's key, secrets, addresses, packed workdirs) except for large folders that can be made again or
exist elsewhere: folders of local VMs, checkpoints, compiled code. For a store in PostgreSQL, use pg_dump.
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
"""What reading a damaged file, or one that is not a backup, raises."""


class BackupError(Exception):
    """A backup cannot be made or restored; `str()` is one line with the way out."""


@dataclass(frozen=True, kw_only=True)
class BackupContents:
    """The manifest of a backup."""

    version: str
    """Version of Varuna that made the backup."""
    revision: str | None
    """Revision of the store's schema; None: the store is in PostgreSQL, and not in the backup."""
    files: dict[str, str]
    """SHA-256 by path."""
    left_out: list[str]


def save_backup(settings: ManagerSettings, file: Path) -> BackupContents:
    """Write the whole backup or nothing; only its owner can read it. Raises BackupError."""
    data_dir = settings.data_dir.resolve()
    if not data_dir.is_dir():
        raise BackupError(f"data directory {data_dir} does not exist: give the manager's --data-dir")
    if file.exists():
        raise BackupError(f"{file} exists: choose another name, as backups do not overwrite each other")
    if file.resolve().is_relative_to(data_dir):
        raise BackupError(f"{file} is in the data directory and would be lost with it: write it elsewhere")
    url = settings.database_url or f"sqlite:///{data_dir / STORE}"
    part = file.with_name(f"{file.name}.part")
    try:
        with (
            _create_private(part) as out,
            tempfile.TemporaryDirectory(prefix=".varuna-backup-", dir=file.parent) as folder,
        ):
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


def restore_backup(file: Path, data_dir: Path) -> BackupContents:
    """Make the data directory of a manager from a backup. If it raises BackupError, it leaves nothing behind."""
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise BackupError(f"{data_dir} is not empty: stop its manager and move its files away, or give another one")
    is_new = not data_dir.exists()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".varuna-restore-", dir=data_dir) as name:
            contents = _unpack(file, Path(name))
            _give_to_owner(Path(name), data_dir)
            # The store comes last, so that no manager starts on a folder that is half restored.
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
    """Copy the store; returns the revision of its schema."""
    if not source.is_file():
        raise BackupError(f"store {source} does not exist: give the manager's --data-dir or --database-url")
    with _create_private(copy):
        pass
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)))
        target = stack.enter_context(contextlib.closing(sqlite3.connect(copy)))
        store.backup(target)  # all pages as of one moment; writers go on in the WAL
        target.execute("PRAGMA journal_mode=DELETE")  # a single file
        (verdict,) = target.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise BackupError(f"the store {source} is damaged ({verdict}): keep your earlier backups")
        (revision,) = target.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(revision)


def _pack(out: IO[bytes], files: dict[str, Path], left_out: list[str], revision: str | None) -> BackupContents:
    sums: dict[str, str] = {}
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
        for name, path in sorted(files.items()):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may have been deleted meanwhile
                sums[name] = _add_file(tar, name, file, os.fstat(file.fileno()).st_size)
        version = importlib.metadata.version("varuna-spot")
        contents = BackupContents(version=version, revision=revision, files=sums, left_out=sorted(left_out))
        with tempfile.TemporaryFile() as manifest:
            size = manifest.write(json.dumps(asdict(contents), indent=1).encode())
            manifest.seek(0)
            _add_file(tar, _MANIFEST, manifest, size)
    return contents


def _files_to_save(settings: ManagerSettings, data_dir: Path, store: Path | None) -> tuple[dict[str, Path], list[str]]:
    """(files by their names in the backup, what is left out). `store` is copied separately."""
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for path in sorted(data_dir.iterdir()):
        if path.name in _LEFT_OUT:
            left_out.append(path.name)
        elif path.name != STORE and path.resolve() != store and not path.name.endswith(_OF_THE_PROCESS):
            files |= _plain_files(path.name, path.resolve(), left_out)
    for name, elsewhere in (("pki", settings.pki_dir), ("secrets", settings.secrets_dir)):
        if elsewhere is not None and elsewhere.exists() and not elsewhere.resolve().is_relative_to(data_dir):
            files |= _plain_files(name, elsewhere.resolve(), left_out)
    return files, left_out


def _plain_files(name: str, path: Path, left_out: list[str]) -> dict[str, Path]:
    """A file, or all files below a folder."""
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
    left_out.append(f"{name} (not a plain file)")
    return {}


def _add_file(tar: tarfile.TarFile, name: str, file: IO[bytes], size: int) -> str:
    """Add a file to the backup; returns its SHA-256."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    reader = _ChecksumReader(file)
    tar.addfile(entry, reader)
    return reader.sum.hexdigest()


class _ChecksumReader:
    """A file that computes its checksum while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sum.update(data)
        return data


# ---------------------------------------------------------------- restoring


def _unpack(file: Path, folder: Path) -> BackupContents:
    found: dict[str, str] = {}
    manifest: dict[str, Any] | None = None
    with tarfile.open(file, "r:gz") as tar:
        for entry in tar:
            name = PurePosixPath(entry.name)
            data = tar.extractfile(entry) if entry.isreg() else None
            if data is None or name.is_absolute() or ".." in name.parts or "\0" in entry.name:
                raise BackupError(f"{file} contains {entry.name!r}, so it is not a backup of Varuna: give another file")
            if entry.name == _MANIFEST:
                manifest = json.load(data)
                continue
            target = folder.joinpath(*name.parts)
            for below in reversed(target.relative_to(folder).parents[:-1]):
                (folder / below).mkdir(mode=0o700, exist_ok=True)
            with _create_private(target) as out:
                found[entry.name] = _copy_data(data, out)
    if manifest is None:
        raise BackupError(f"{file} is not a backup of Varuna, or is incomplete: it has no {_MANIFEST}")
    try:
        contents = BackupContents(**manifest)
    except TypeError as error:
        raise BackupError(
            f"{file} has an unknown kind of {_MANIFEST}: restore it with the version that made it"
        ) from error
    if found != contents.files:
        wrong = sorted(name for name in {*found, *contents.files} if found.get(name) != contents.files.get(name))
        raise BackupError(f"{file} is damaged: {wrong[0]} differs from what was saved; use another backup")
    if contents.revision is not None and contents.revision not in known_revisions():
        raise BackupError(
            f"{file} was made by Varuna {contents.version}, and this version does not know its store (revision "
            f"{contents.revision}): restore it with that version, or a later one"
        )
    return contents


def _copy_data(source: IO[bytes], target: IO[bytes]) -> str:
    summed = hashlib.sha256()
    while data := source.read(_PIECE):
        summed.update(data)
        target.write(data)
    target.flush()
    os.fsync(target.fileno())
    return summed.hexdigest()


def _give_to_owner(folder: Path, data_dir: Path) -> None:
    """If root restores, give the files to the owner of the data directory."""
    if os.geteuid() == 0:
        owner = data_dir.stat()
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _create_private(path: Path) -> IO[bytes]:
    """A new file that only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")
