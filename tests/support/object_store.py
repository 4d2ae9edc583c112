"""A folder served as a bucket of S3, read-only: enough of the protocol for clients that list and read."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from waiting import POLL_S

__all__ = ["Bucket", "serve_bucket"]


class Read(NamedTuple):
    """One request for an object's bytes."""

    key: str
    bytes: int


class Bucket:
    """What clients ask of the bucket `bucket`, and how it answers."""

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        self.environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
        self.reads: list[Read] = []
        self.access_keys: set[str] = set()
        self.refuses = ""
        """Reads of keys that contain this text get a 403; "": none do."""


@contextmanager
def serve_bucket(root: Path) -> Iterator[Bucket]:
    """Serves `root` as `s3://bucket` until the block ends. Clients need the bucket's `environ`, and any keys."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.bucket = Bucket(root, server.server_port)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield server.bucket  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        bucket: Bucket = self.server.bucket  # type: ignore[attr-defined]
        if match := re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", "")):
            bucket.access_keys.add(match[1])
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix("/bucket").strip("/")
        query = parse_qs(url.query)
        if "list-type" in query:
            self._answer(200, self._listing(bucket, query).encode())
            return
        file = bucket.root / key
        if bucket.refuses and bucket.refuses in key:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif not file.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            data = file.read_bytes()
            given = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(given[1]), min(int(given[2]), len(data) - 1)) if given else (0, len(data) - 1)
            part = data[first : last + 1]
            if self.command == "GET":
                bucket.reads.append(Read(key, len(part)))
            headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if given else {}
            self._answer(206 if given else 200, part, headers)

    def _listing(self, bucket: Bucket, query: dict[str, list[str]]) -> str:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        objects, folders = [], set()
        for path in sorted(bucket.root.rglob("*")):
            key = path.relative_to(bucket.root).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                objects.append((key, path.stat().st_size))
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in objects
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>"

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        common = {"Content-Length": str(len(body)), "ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        for name, value in (common | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  # as http.server names them

    def log_message(self, format: str, *args: object) -> None:
        pass
