"""Datasets by URL: copied to a VM once, whoever asks, and again only when they have changed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from varuna.data import local_copy
from waiting import POLL_S


class _Bucket(ThreadingHTTPServer):
    """An object store that speaks as much of S3 as listing and reading need; its bucket is `b`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.knows_ranges = True
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Bucket

    def do_HEAD(self) -> None:
        self._object(with_body=False)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path in ("/b", "/b/"):
            self._list(parse_qs(asked.query).get("prefix", [""])[0])
        else:
            self._object(with_body=True)

    def _list(self, prefix: str) -> None:
        found = [(key, data) for key, data in self.server.objects.items() if key.startswith(prefix)]
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{hash(data)}"</ETag><Size>{len(data)}</Size></Contents>'
            for key, data in found
        )
        self._answer(f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())

    def _object(self, *, with_body: bool) -> None:
        key = unquote(self.path).removeprefix("/b/")
        data = self.server.objects.get(key)
        if data is None:
            self.send_error(404)
            return
        if with_body:
            self.server.reads.append(key)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), int(asked[2]) + 1) if asked and self.server.knows_ranges else (0, len(data))
        part = f"bytes {begin}-{end - 1}/{len(data)}" if asked and self.server.knows_ranges else ""
        self._answer(data[begin:end], with_body=with_body, etag=f'"{hash(data)}"', part=part)

    def _answer(self, data: bytes, *, with_body: bool = True, etag: str = '"x"', part: str = "") -> None:
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Bucket]:
    with _Bucket() as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        for name, value in (
            ("AWS_ENDPOINT_URL", server.url),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_SKIP_SIGNATURE", "true"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()
        thread.join()


def test_a_file_is_copied_once_for_all_who_ask(bucket: _Bucket, tmp_path: Path) -> None:
    bucket.objects["corpus/train.npy"] = bytes(300_000)
    with ThreadPoolExecutor(8) as workers:
        paths = set(workers.map(lambda _: local_copy("s3://b/corpus/train.npy", tmp_path), range(8)))
    (path,) = paths
    assert (path.name, path.read_bytes()) == ("train.npy", bytes(300_000))
    assert bucket.reads == ["corpus/train.npy"]
    bucket.objects["corpus/train.npy"] = b"another"
    changed = local_copy("s3://b/corpus/train.npy", tmp_path)
    assert changed.read_bytes() == b"another"
    assert path.read_bytes() == bytes(300_000), "whoever reads the old one still has it"


def test_a_folder_comes_with_all_that_is_below_it(
    bucket: _Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.objects |= {"data/a.npy": b"a", "data/part/b.npy": b"bb", "database/c.npy": b"c"}
    monkeypatch.setenv("VARUNA_DATA_DIR", str(tmp_path))
    folder = local_copy("s3://b/data/")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.npy")} == {"a.npy", "part/b.npy"}
    assert (folder / "part" / "b.npy").read_bytes() == b"bb"
    bucket.reads.clear()
    assert local_copy("s3://b/data/") == folder
    assert bucket.reads == []


def test_a_copy_that_was_cut_short_is_no_copy(bucket: _Bucket, tmp_path: Path) -> None:
    bucket.objects["train.npy"] = b"whole"
    path = local_copy("s3://b/train.npy", tmp_path)
    half = path.parent.rename(path.parent.with_suffix(".part"))  # as a killed process leaves it
    (half / "train.npy").write_bytes(b"wh")
    assert local_copy("s3://b/train.npy", tmp_path).read_bytes() == b"whole"
    assert not half.exists()


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b"wh"), Path.unlink])
def test_a_copy_whose_files_have_lost_bytes_is_made_again(
    bucket: _Bucket, tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    bucket.objects |= {"data/a.npy": b"whole", "data/part/b.npy": b"bb"}
    folder = local_copy("s3://b/data", tmp_path)
    harm(folder / "a.npy")  # as a power cut may leave it
    assert local_copy("s3://b/data", tmp_path) == folder
    assert (folder / "a.npy").read_bytes() == b"whole"
    assert (folder / "part" / "b.npy").read_bytes() == b"bb"
    assert list(tmp_path.glob("*.part")) == []


def test_a_copy_is_on_the_disk_before_it_has_its_name(
    bucket: _Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.objects |= {"data/a.npy": b"a", "data/part/b.npy": b"bb"}
    synced: list[tuple[str, bool]] = []
    """Each with whether the copy had its name."""

    def sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.name if path.suffix != ".part" else ".part", bool(list(tmp_path.glob("*.part")))))

    monkeypatch.setattr(os, "fsync", sync)
    local_copy("s3://b/data", tmp_path)
    before = [name for name, is_part in synced if is_part]
    assert sorted(before) == [".part", "a.npy", "b.npy", "part"]
    assert before.index("b.npy") < before.index("part")
    assert [name for name, is_part in synced if not is_part] == [tmp_path.name]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_files_by_http(bucket: _Bucket, tmp_path: Path, knows_ranges: bool) -> None:
    bucket.knows_ranges = knows_ranges
    bucket.objects["train.npy"] = b"x"
    assert local_copy(f"{bucket.url}/b/train.npy", tmp_path).read_bytes() == b"x"


def test_a_store_that_knows_no_ranges(bucket: _Bucket, tmp_path: Path) -> None:
    bucket.knows_ranges = False
    bucket.objects["train.npy"] = b"xyz"
    assert local_copy("s3://b/train.npy", tmp_path).read_bytes() == b"xyz"


def test_what_is_on_this_machine_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "a b.npy").write_bytes(b"x")
    assert local_copy(str(tmp_path / "a b.npy")) == tmp_path / "a b.npy"
    assert local_copy((tmp_path / "a b.npy").as_uri()) == tmp_path / "a b.npy"
    assert list(tmp_path.iterdir()) == [tmp_path / "a b.npy"]


def test_what_is_wrong_is_said_in_one_line(bucket: _Bucket, tmp_path: Path) -> None:
    for url in (str(tmp_path / "no"), "s3://b/no"):
        with pytest.raises(FileNotFoundError, match=f"there is nothing at {url}"):
            local_copy(url, tmp_path)
    for url in ("gopher://x/y", "s3:///y"):
        with pytest.raises(ValueError, match=f"data URL '{url}': [^\n]*; give a path, or s3://") as caught:
            local_copy(url, tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "file").touch()
    bucket.objects["train.npy"] = b"x"
    with pytest.raises(OSError, match="file"):
        local_copy("s3://b/train.npy", tmp_path / "file")
