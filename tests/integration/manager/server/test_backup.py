"""What a backup has, what it refuses, and that a harmed one restores nothing."""

from __future__ import annotations

import gzip
import io
import json
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from migrated_stores import migrated
from varuna_manager.backup import BackupError, restore_backup, save_backup
from varuna_manager.db.engine import Database
from varuna_manager.db.models import JobRow
from varuna_manager.settings import ManagerSettings
from waiting import DEADLINE_S


@pytest.fixture
async def data_dir(tmp_path: Path) -> Path:
    """A manager's, with a job, an authority, secrets and what is left out."""
    folder = tmp_path / "data"
    for name in (
        "pki/ca.key",
        "secrets/token",
        "admin-token",
        "archives/ab/abcd",
        "vms/local-1/agent.log",
        "local.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for name in ("manager.lock", "manager.db.lock", "manager.json.part"):
        (folder / name).touch()
    migrated(folder / "manager.db")
    database = Database(f"sqlite:///{folder / 'manager.db'}")
    async with database.write() as session:
        session.add(JobRow(id="j", name="j", state="queued", spec={}, history=[], created_at=1.0))
    await database.close()
    return folder


def settings(data_dir: Path, **changes: Any) -> ManagerSettings:
    return ManagerSettings(data_dir=data_dir, **changes)


async def names(data_dir: Path) -> list[str]:
    """Of the jobs in its store."""
    from sqlalchemy import select

    database = Database(f"sqlite:///{data_dir / 'manager.db'}")
    async with database.read() as session:
        found = list(await session.scalars(select(JobRow.name)))
    await database.close()
    return found


async def test_a_backup_has_the_store_the_authority_and_all_secrets_and_is_private(
    data_dir: Path, tmp_path: Path
) -> None:
    file, restored = tmp_path / "b.tar.gz", tmp_path / "new" / "data"
    saved = save_backup(settings(data_dir), file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert saved.left_out == ["vms"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar.gz", "data"], "nothing is left beside it"
    restore_backup(file, restored)
    found = {str(path.relative_to(restored)): path for path in restored.rglob("*") if path.is_file()}
    secret = {"pki/ca.key", "secrets/token", "admin-token", "archives/ab/abcd", "local.json"}
    assert found.keys() == {*secret, "manager.db"}
    assert all(found[name].read_text() == name for name in secret)
    assert {stat.S_IMODE(path.stat().st_mode) for path in found.values()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in restored.rglob("*") if path.is_dir()} == {0o700}
    assert await names(restored) == ["j"]


async def test_what_is_elsewhere_is_found(data_dir: Path, tmp_path: Path) -> None:
    pki, store = tmp_path / "etc" / "pki", tmp_path / "disk" / "other.db"
    for path in (pki, store.parent):
        path.mkdir(parents=True)
    (pki / "ca.key").write_text("the shared one")
    (data_dir / "manager.db").rename(store)
    linked = tmp_path / "elsewhere"
    (data_dir / "secrets").rename(linked)
    (data_dir / "secrets").symlink_to(linked)
    save_backup(settings(data_dir, pki_dir=pki, database_url=f"sqlite:///{store}"), tmp_path / "b.tar.gz")
    restore_backup(tmp_path / "b.tar.gz", tmp_path / "new")
    assert (tmp_path / "new" / "pki" / "ca.key").read_text() == "the shared one"
    assert (tmp_path / "new" / "secrets" / "token").read_text() == "secrets/token"
    assert await names(tmp_path / "new") == ["j"]


def test_secrets_in_a_folder_of_their_own_are_saved(data_dir: Path, tmp_path: Path) -> None:
    secrets = tmp_path / "etc" / "secrets"
    secrets.parent.mkdir()
    (data_dir / "secrets").rename(secrets)
    save_backup(settings(data_dir, secrets_dir=secrets), tmp_path / "b.tar.gz")
    restore_backup(tmp_path / "b.tar.gz", tmp_path / "new")
    assert (tmp_path / "new" / "secrets" / "token").read_text() == "secrets/token"


def test_mistakes_are_told_and_leave_nothing(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    for wrong, words in [
        (settings(tmp_path / "none"), "data directory .* does not exist"),
        (
            settings(data_dir, database_url=f"sqlite:///{tmp_path}/no.db"),
            "store .*no.db does not exist: give the manager",
        ),
    ]:
        with pytest.raises(BackupError, match=words):
            save_backup(wrong, file)
    with pytest.raises(BackupError, match="in the data directory and would be lost with it"):
        save_backup(settings(data_dir), data_dir / "b.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    save_backup(settings(data_dir), file)
    with pytest.raises(BackupError, match="exists: choose another name"):
        save_backup(settings(data_dir), file)
    with pytest.raises(BackupError, match="is not empty: stop its manager"):
        restore_backup(file, data_dir)


def test_a_store_that_is_harmed_is_not_saved(data_dir: Path, tmp_path: Path) -> None:
    with (data_dir / "manager.db").open("r+b") as store:
        store.seek(4096)
        store.write(b"\xff" * 8192)
    with pytest.raises(BackupError, match=r"is damaged|no backup was written"):
        save_backup(settings(data_dir), tmp_path / "b.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def repacked(file: Path, change: Any) -> None:
    """The backup with `change` made to its {name: bytes}."""
    with tarfile.open(file) as tar:
        entries = {entry.name: (entry, tar.extractfile(entry).read()) for entry in tar}  # type: ignore[union-attr]
    change(entries)
    with tarfile.open(file, "w:gz") as tar:
        for entry, data in entries.values():
            entry.size = len(data) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(data))


def spoil_key(entries: Any) -> None:
    entries["pki/ca.key"] = (entries["pki/ca.key"][0], b"another")


def climb(entries: Any) -> None:
    entries["x"] = (tarfile.TarInfo("../outside"), b"x")


def link(entries: Any) -> None:
    entry = tarfile.TarInfo("pki/link")
    entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
    entries["x"] = (entry, b"")


def lose(entries: Any) -> None:
    del entries["secrets/token"]


def lose_manifest(entries: Any) -> None:
    del entries["varuna-backup.json"]


def later(entries: Any) -> None:
    entry, data = entries["varuna-backup.json"]
    entries["varuna-backup.json"] = (entry, json.dumps({**json.loads(data), "revision": "9999"}).encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil_key, "is damaged: pki/ca.key differs from what was saved"),
        (climb, "contains '../outside', so it is not a backup of Varuna"),
        (link, "contains 'pki/link', so it is not a backup of Varuna"),
        (lose, "is damaged: secrets/token differs"),
        (lose_manifest, "is not a backup of Varuna, or is incomplete"),
        (later, "does not know its store .revision 9999.: restore it with that version"),
    ],
)
def test_a_harmed_or_foreign_backup_restores_nothing(data_dir: Path, tmp_path: Path, change: Any, words: str) -> None:
    file = tmp_path / "b.tar.gz"
    save_backup(settings(data_dir), file)
    repacked(file, change)
    empty = tmp_path / "empty"
    empty.mkdir()
    for target in (tmp_path / "new", empty):
        with pytest.raises(BackupError, match=words):
            restore_backup(file, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar.gz", "data", "empty"]
    assert not list(empty.iterdir())


@pytest.mark.parametrize("data", [b"", b"hello", gzip.compress(b"hello")], ids=["empty", "text", "compressed text"])
def test_another_file_restores_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "b.tar.gz").write_bytes(data)
    with pytest.raises(BackupError, match=r"cannot be restored|not a backup of Varuna"):
        restore_backup(tmp_path / "b.tar.gz", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_half_a_backup_restores_nothing(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    save_backup(settings(data_dir), file)
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(BackupError):
        restore_backup(file, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_commands_say_it_in_one_line(data_dir: Path, tmp_path: Path) -> None:
    def varuna(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "varuna_client.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)

    file = str(tmp_path / "b.tar.gz")
    done = varuna("backup", "--data-dir", str(data_dir), file)
    assert done.returncode == 0, done.stderr
    assert "not in it: vms" in done.stdout
    refused = varuna("restore", "--data-dir", str(data_dir), file)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is not empty: stop its manager" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
