"""The disk of the manager's store is full: changes are answered with 503, and everything else goes on."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from asyncpg import DiskFullError, ReadOnlySQLTransactionError
from sqlalchemy.exc import DBAPIError

from secure_world import secure_manager
from varuna_manager.db.engine import StoreFullError, StoreReadOnlyError, _raising_when_away
from waiting import wait_until

SPEC = {"workdir": "/tmp", "run": "true", "global_batch": 8, "env": {"WANDB_API_KEY": "k-4711"}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_changes_and_mends_itself(tmp_path: Path, small_disk: Path) -> None:
    flags = ("--vms", "0", "--database-url", f"sqlite:///{small_disk / 'manager.db'}", "--changes-per-s", "1000")
    with secure_manager(tmp_path / "data", *flags) as manager:
        admin = manager.admin()
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # the manager may write meanwhile
            while True:
                file.write(bytes(4096))
        names = iter(range(1_000_000))

        def refusal() -> httpx.Response | None:
            """The first change that is refused: SQLite's log may have room for a few."""
            answer = admin.post("/jobs", json={**SPEC, "name": f"job-{next(names)}"})
            return None if answer.status_code == 201 else answer

        refused = wait_until(refusal, "a refusal")
        assert refused.status_code == 503, refused.text
        assert "the store cannot be written" in refused.json()["detail"]
        assert "make room" in refused.json()["detail"]
        assert refused.headers["retry-after"] == "1"
        assert admin.delete("/tokens/nobody").status_code == 503
        for path in ("/jobs", "/vms", "/events", "/healthz", "/readyz", "/tokens"):
            assert admin.get(path).status_code == 200, path
        assert manager.client("vt1.0.0").get("/jobs").status_code == 401
        ballast.unlink()
        wait_until(lambda: admin.post("/jobs", json={**SPEC, "name": "after"}).status_code == 201, "room")
        assert manager.log.count("the store is away: trying again") == 1
        assert manager.log.count("the store is back") == 1
        assert "Traceback" not in manager.log
        assert "k-4711" not in manager.log


def test_postgresql_says_that_its_disk_is_full_by_a_sqlstate() -> None:
    with pytest.raises(StoreFullError, match="No space left on device"), _raising_when_away():
        raise DBAPIError("INSERT", {}, DiskFullError("could not extend file: No space left on device"))


def test_postgresql_says_that_it_takes_no_writes_by_a_sqlstate() -> None:
    with pytest.raises(StoreReadOnlyError, match=r"in a read-only transaction.*make room"), _raising_when_away():
        raise DBAPIError("UPDATE", {}, ReadOnlySQLTransactionError("cannot execute UPDATE in a read-only transaction"))
