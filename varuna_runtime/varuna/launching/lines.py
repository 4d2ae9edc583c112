"""Whole lines from several processes into one output: `print(a, b)` is several writes, which would get mixed."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TextIO

__all__ = ["ByteWriter", "LineRelay", "make_stream_writer"]

ByteWriter = Callable[[bytes], None]

_READ_BYTES = 65536
_LOOKS = 20


def make_stream_writer(stream: TextIO) -> ByteWriter:
    """A writer of whole pieces to `stream`, for several threads; it drops them once the reader is gone."""
    lock = threading.Lock()

    def write(piece: bytes) -> None:
        with lock, suppress(BrokenPipeError):
            stream.flush()
            view = memoryview(piece)
            while view:
                view = view[os.write(stream.fileno(), view) :]

    return write


class LineRelay:
    """Threads that pass on what comes through pipes, line by line, until the pipes' other ends are closed."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def relay_process(self, process: subprocess.Popen[bytes], out: ByteWriter, err: ByteWriter) -> None:
        """Passes on what a process writes to its pipes, if it has any. A line may also end with a carriage return, so
        that progress bars are seen to move."""
        for source, write in ((process.stdout, out), (process.stderr, err)):
            if source is not None:
                name = f"lines-{process.pid}"
                thread = threading.Thread(target=_pass_on, args=(source, write), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits for the last lines of processes that have ended, at most `timeout_s` for each pipe."""
        for thread in self._threads:
            for _ in range(_LOOKS):  # a process that stood still has missed one of them
                thread.join(timeout_s / _LOOKS)
                if not thread.is_alive():
                    break


def _pass_on(source: IO[bytes], write: ByteWriter) -> None:
    rest = b""
    while piece := os.read(source.fileno(), _READ_BYTES):
        rest += piece
        whole = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if whole:
            write(rest[:whole])
            rest = rest[whole:]
    if rest:
        write(rest + b"\n")
