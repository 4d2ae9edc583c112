"""A line to PostgreSQL that a test cuts or blocks: to whoever is behind it, the server is away; to others it is not."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

_SOCKET = ".s.PGSQL.5432"


class PostgresLine:
    """A relay from one Unix socket to the server's own."""

    def __init__(self, url: str, folder: Path) -> None:
        parts = urlsplit(url)
        self._server = str(Path(parse_qs(parts.query)["host"][0]) / _SOCKET)
        self._path = folder / _SOCKET
        self.url = urlunsplit(parts._replace(query=f"host={folder}"))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._is_passing = True
        self.mend()

    def cut(self) -> None:
        """Ends every connection, and takes no new one."""
        with self._lock:
            if self._listener is not None:
                self._path.unlink()
                self._listener.close()
                self._listener = None
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def block(self) -> None:
        """Keeps every connection open and passes nothing on, as when the server's packets are dropped."""
        self._is_passing = False

    def mend(self) -> None:
        with self._lock:
            self._listener = listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self._path))
            listener.listen()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return  # cut
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._server)
            with self._lock:
                if self._listener is not listener:
                    near.close()
                    far.close()
                    return
                self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._is_passing:
                    target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextmanager
def postgres_line(url: str) -> Iterator[PostgresLine]:
    # A folder of a short name: a Unix socket's path takes 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="line-"))
    line = PostgresLine(url, folder)
    try:
        yield line
    finally:
        line.cut()
        shutil.rmtree(folder)
