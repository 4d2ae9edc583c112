"""Which files of a workdir go to the VMs, and that the same files make the same archive."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
from pathlib import Path
from typing import IO, cast

import pytest

from varuna_agent.folders import unpack as unpacking
from varuna_agent.folders.unpack import unpack
from varuna_client import UserError
from varuna_client.jobfile import workdir
from varuna_client.jobfile.jobfile import load_job, submit_job
from varuna_client.jobfile.workdir import pack
from varuna_client.rest.client import Client


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def packed(folder: Path) -> tuple[str, dict[str, tarfile.TarInfo]]:
    out = io.BytesIO()
    made = pack(folder, out)
    assert made.total_bytes == len(out.getvalue())
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        return made.sha256, {info.name: info for info in archive}


def test_links_within_the_folder_come_along_as_agents_take_them(tmp_path: Path) -> None:
    folder = put(tmp_path / "job", {"pkg/data/tokens": "x", "train.py": "x"})
    for name, target in (
        ("plain", "pkg/data"),
        ("up", "pkg/../train.py"),
        ("pkg/absolute", str(folder / "pkg" / "data" / "tokens")),
        ("pkg/around", "../../job/train.py"),
        ("dangling", "pkg/nothing"),
    ):
        (folder / name).symlink_to(target)
    out = io.BytesIO()
    pack(folder, out)
    out.seek(0)
    copy = tmp_path / "vm"
    copy.mkdir()
    unpack(out, copy)
    assert {str(path.relative_to(copy)): str(path.readlink()) for path in copy.rglob("*") if path.is_symlink()} == {
        "plain": "pkg/data",
        "up": "train.py",
        "pkg/absolute": "data/tokens",
        "pkg/around": "../train.py",
        "dangling": "pkg/nothing",
    }


def test_the_same_files_make_the_same_archive_whenever_and_wherever(tmp_path: Path) -> None:
    first = put(tmp_path / "a", {"train.py": "x = 1\n", "pkg/mod.py": "y = 2\n"})
    second = put(tmp_path / "b", {"pkg/mod.py": "y = 2\n", "train.py": "x = 1\n"})
    os.utime(second / "train.py", (1, 1))
    (second / "train.py").chmod(0o600)
    assert packed(first)[0] == packed(second)[0]
    (second / "train.py").chmod(0o700)
    changed = packed(second)
    assert changed[0] != packed(first)[0]
    assert changed[1]["train.py"].mode == 0o755


def test_what_git_ignores_stays(tmp_path: Path) -> None:
    folder = put(
        tmp_path,
        {
            "train.py": "",
            "data/big.bin": "",
            "data/small.txt": "",
            "out/x": "",
            "keep.log": "",
            "lose.log": "",
            "sub/inner.txt": "",
            "sub/secret": "",
            ".git/config": "",
            "sub/__pycache__/m.pyc": "",
        },
    )
    (folder / ".gitignore").write_text("*.bin\nout/\n*.log\n!keep.log\n")
    (folder / "sub" / ".gitignore").write_text("secret\n")
    (folder / ".varunaignore").write_text("/data/small.txt\n")
    names = {name for name, info in packed(folder)[1].items() if info.isfile()}
    assert names == {".gitignore", ".varunaignore", "keep.log", "sub/.gitignore", "sub/inner.txt", "train.py"}


def test_the_rules_of_the_repository_around_it_hold_too(tmp_path: Path) -> None:
    put(tmp_path, {".git/config": "", "job/train.py": "", "job/runs/old": ""})
    (tmp_path / ".gitignore").write_text("job/runs\n")
    assert set(packed(tmp_path / "job")[1]) == {"train.py"}


def test_links_go_along_unless_they_lead_outside(tmp_path: Path) -> None:
    folder = put(tmp_path / "job", {"train.py": "x"})
    (folder / "main.py").symlink_to("train.py")
    os.link(folder / "train.py", folder / "same.py")
    entries = packed(folder)[1]
    assert entries["main.py"].issym()
    assert entries["same.py"].isfile()
    (folder / "away").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"away is a link to /etc/hostname, outside: copy it"):
        packed(folder)


def test_a_workdir_that_is_too_large_names_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path, {"small": "x"})
    (folder / "weights.bin").write_bytes(os.urandom(3 * 2**20))
    monkeypatch.setattr(workdir, "MOST_BYTES", 2**20)
    with pytest.raises(UserError, match=r"has 3 MiB, more than 1: .*\.varunaignore.*weights\.bin \(3 MiB\)"):
        packed(folder)


def test_what_agents_would_not_unpack_is_said_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workdir._MOST_MEMBERS == unpacking.MOST_MEMBERS
    assert workdir._MOST_UNPACKED_BYTES == unpacking.MOST_UNPACKED_BYTES
    assert (workdir._MOST_NAME_BYTES, workdir._MOST_DEPTH) == (unpacking.MOST_NAME_BYTES, unpacking.MOST_DEPTH)
    deep = put(tmp_path / "deep", {"/".join(["d"] * unpacking.MOST_DEPTH) + "/file": "x"})
    with pytest.raises(UserError, match=r"d/d/d/.* is too long or too deep: names may have 1024 bytes and 64 folders"):
        packed(deep)
    monkeypatch.setattr(workdir, "_MOST_MEMBERS", 3)
    many = put(tmp_path / "many", {"train.py": "x", "images/1": "x", "images/2": "x"})
    with pytest.raises(UserError, match=r"has 4 files and folders, more than 3: .* \(most are in images\)"):
        packed(many)


def test_a_link_to_itself_stays_and_is_named(tmp_path: Path) -> None:
    folder = put(tmp_path / "job", {"train.py": "x"})
    (folder / "again").symlink_to("again")
    (folder / "there").symlink_to("back")
    (folder / "back").symlink_to("there")
    made = pack(folder, io.BytesIO())
    assert [left.partition(" ")[0] for left in made.left_out] == ["again", "back", "there"]
    assert "again (a link that leads to itself)" in made.left_out


def test_a_malformed_pattern_names_no_file_as_in_git(tmp_path: Path) -> None:
    folder = put(tmp_path / "job", {".gitignore": "!\n*.log\nname\\\n", "a.log": "x", "name": "x"})
    assert set(packed(folder)[1]) == {".gitignore", "name"}


def test_a_file_that_goes_or_shrinks_while_it_is_packed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path / "job", {"log": "x" * 100})
    add = tarfile.TarFile.addfile

    def shrink_first(archive: tarfile.TarFile, info: tarfile.TarInfo, file: IO[bytes] | None = None) -> None:
        (folder / "log").write_text("")
        add(archive, info, file)

    with monkeypatch.context() as changed:
        changed.setattr(tarfile.TarFile, "addfile", shrink_first)
        with pytest.raises(UserError, match=r"cannot pack .*: unexpected end of data: it changes"):
            packed(folder)

    def remove_first(path: Path) -> str | None:
        path.unlink()
        return None

    monkeypatch.setattr(workdir, "_find_obstacle", remove_first)
    with pytest.raises(UserError, match=r"cannot pack .*log: No such file or directory"):
        packed(folder)


def test_sockets_pipes_and_devices_are_left_out_and_named(tmp_path: Path) -> None:
    folder = put(tmp_path / "job", {"train.py": "x", "pkg/mod.py": "y"})
    os.mkfifo(folder / "pkg" / "pipe")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(folder):
        listening.bind("sock")
        (folder / "null").symlink_to("/dev/null")
        with pytest.raises(UserError, match="null is a link to /dev/null, outside"):
            packed(folder)
        (folder / "null").unlink()
        out = io.BytesIO()
        made = pack(folder, out)
    assert made.left_out == ("pkg/pipe (a pipe)", "sock (a socket)")
    assert made.files == 2
    assert set(packed(folder)[1]) == {"pkg", "pkg/mod.py", "train.py"}


@pytest.mark.parametrize("mark", ["manager.lock", "manager.db", "manager.db.lock"])
def test_a_managers_data_directory_stays_and_is_named(tmp_path: Path, mark: str) -> None:
    folder = put(tmp_path / "job", {"train.py": "x", f"state/{mark}": "", "state/ca.key": "secret"})
    assert set(packed(folder)[1]) == {"train.py"}
    assert pack(folder, io.BytesIO()).left_out == ("state (a manager's data directory)",)
    with pytest.raises(UserError, match=r"state is a manager's data directory, with its keys: give the job"):
        pack(folder / "state", io.BytesIO())


def test_what_is_left_out_is_one_line_for_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(tmp_path / "job", {"train.py": "x"})
    for number in range(5):
        os.mkfifo(folder / f"pipe{number}")
    (tmp_path / "job.yaml").write_text(f"workdir: {folder}\nrun: python train.py\nglobal_batch: 8\n")

    class Taking:
        def has_archive(self, sha256: str) -> bool:
            return True

        def submit(self, spec: dict[str, object]) -> dict[str, object]:
            return spec

    submit_job(cast(Client, Taking()), load_job(tmp_path / "job.yaml"))
    assert capsys.readouterr().err == (
        "varuna: workdir: left out pipe0 (a pipe), pipe1 (a pipe), pipe2 (a pipe) and 2 more\n"
    )
