"""Archives that `varuna submit` would never make: none leaves its folder or takes unlimited space."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_agent.folders import unpack
from varuna_agent.folders.unpack import ArchiveRefusedError


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, data: bytes = b"", link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.SYMTYPE, link=target)


def unpacked(folder: Path, data: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    unpack.unpack(io.BytesIO(data), folder)
    return folder


def refused(folder: Path, data: bytes) -> str:
    with pytest.raises(ArchiveRefusedError) as caught:
        unpacked(folder, data)
    return str(caught.value)


def test_files_folders_and_links_that_stay_inside_come_along(tmp_path: Path) -> None:
    script = member("pkg/run.sh", data=b"#!/bin/sh\n")
    script[0].mode = 0o4777
    data = archive_of(
        member("pkg", tarfile.DIRTYPE),
        script,
        member("./deep/er/file", data=b"x" * 3_000_000),
        member("empty/", tarfile.DIRTYPE),
        link("deep/er/up", "../../pkg/run.sh"),
        link("side", "pkg"),
        link("dangling", "nothing/there"),
    )
    folder = unpacked(tmp_path / "files", data)
    assert (folder / "deep/er/file").stat().st_size == 3_000_000
    assert (folder / "pkg/run.sh").stat().st_mode & 0o7777 == 0o755
    assert (folder / "deep/er/up").read_text() == (folder / "side/run.sh").read_text() == "#!/bin/sh\n"
    assert (folder / "empty").is_dir()
    assert (folder / "dangling").is_symlink()


def in_parts(depth: int, length: int) -> str:
    return "/".join(["d" * length] * depth)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([member("/etc/evil")], "leads out"),
        ([member("../evil")], "leads out"),
        ([member("a/../../evil")], "leads out"),
        ([member("a"), member("b", tarfile.LNKTYPE, link="a")], "hard link"),
        ([member("b", tarfile.LNKTYPE, link="/etc/shadow")], "hard link"),
        ([member("pipe", tarfile.FIFOTYPE)], "neither a file"),
        ([member("disk", tarfile.BLKTYPE)], "neither a file"),
        ([link("evil", "/etc")], "may lie outside"),
        ([link("evil", "..")], "may lie outside"),
        ([link("a/evil", "../..")], "may lie outside"),
        ([link("a/evil", "b/../../..")], "may lie outside"),
        ([link("evil", "")], "may lie outside"),
        ([link("a", "b"), member("a/file")], "something else as well"),
        ([link("a", "."), link("a/b", "..")], "something else as well"),
        ([member("a"), member("a")], "comes twice"),
        ([link("a", "b"), member("a")], "comes twice"),
        ([member("a", tarfile.DIRTYPE), link("a", "b")], "comes twice"),
        ([member("a/b"), member("a")], "comes twice"),
        ([member("a"), member("a/b")], "something else as well"),
        ([member(in_parts(65, 1))], "too deep"),
        ([member(in_parts(6, 200))], "too long"),
        ([link("a", in_parts(6, 200))], "more than 1024 bytes"),
    ],
)
def test_what_leads_outside_or_is_no_plain_content_is_refused(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], why: str
) -> None:
    assert why in refused(tmp_path / "files", archive_of(*members))
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_a_link_by_way_of_another_does_not_climb_out(tmp_path: Path) -> None:
    """By its text each path is inside, but d/x is a link to the folder, and d/x/.. is above it."""
    data = archive_of(link("d/x", ".."), link("y", "d/x/.."))
    assert "may lie outside" in refused(tmp_path / "files", data)


NAMES = st.lists(st.sampled_from(["a", "b", "c", ".."]), min_size=1, max_size=4).map("/".join)


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(
        st.one_of(
            st.tuples(st.just("file"), NAMES, st.just("")),
            st.tuples(st.just("folder"), NAMES, st.just("")),
            st.tuples(st.just("link"), NAMES, NAMES),
        ),
        max_size=8,
    )
)
def test_no_sequence_of_members_makes_anything_outside(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, str, str]]
) -> None:
    """Whatever was unpacked before a member was refused, each file and link resolves to something inside."""
    around = tmp_path_factory.mktemp("around")
    kinds = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}
    folder = around / "files"
    with suppress(ArchiveRefusedError):
        unpacked(folder, archive_of(*(member(name, kinds[kind], link=target) for kind, name, target in members)))
    assert [path.name for path in around.iterdir()] == ["files"]
    for path in folder.rglob("*"):
        try:
            assert path.resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError):  # links in a circle lead nowhere
            continue


def raw_header(kind: bytes, size: int, data: bytes = b"") -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % 512)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no archive at all", "not a .tar.gz"),
        (gzip.compress(b"\x01" * 2048), "not a .tar.gz"),
        (archive_of(member("a", data=b"x" * 100_000))[:80], "not a .tar.gz"),
        (gzip.compress(raw_header(tarfile.REGTYPE, 5000, b"x" * 512)), "ends within"),
        (gzip.compress(raw_header(tarfile.XHDTYPE, 2**33)), "header of 8589934592 bytes"),
        (gzip.compress(raw_header(tarfile.GNUTYPE_LONGNAME, 2**33)), "header of 8589934592 bytes"),
        (gzip.compress(raw_header(tarfile.REGTYPE, -(2**20))), "below 0|more than"),
    ],
    ids=["text", "noise", "cut", "short", "long attributes", "long name", "negative size"],
)
def test_headers_and_sizes_that_lie_are_refused(tmp_path: Path, data: bytes, why: str) -> None:
    error = refused(tmp_path / "files", data)
    assert any(part in error for part in why.split("|")), error


def test_a_chain_of_headers_that_never_comes_to_a_member_is_refused(tmp_path: Path) -> None:
    attributes = b"11 a=bcdef\n"
    data = gzip.compress(raw_header(tarfile.XHDTYPE, len(attributes), attributes) * 20_000)
    assert "too much memory" in refused(tmp_path / "files", data)


@pytest.mark.parametrize(
    ("bound", "value", "why"),
    [
        ("MOST_MEMBERS", 3, "more than 3 members"),
        ("MOST_UNPACKED_BYTES", 1000, "more than 1000 bytes"),
        ("_MOST_TAR_BYTES", 4096, "headers included"),
    ],
)
def test_members_and_bytes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, why: str
) -> None:
    data = archive_of(*(member(f"f{number}", data=b"x" * 500) for number in range(4)))
    make: Callable[[], Path] = lambda: unpacked(tmp_path / "whole", data)  # noqa: E731
    assert len(list(make().iterdir())) == 4
    monkeypatch.setattr(unpack, bound, value)
    assert why in refused(tmp_path / "files", data)
