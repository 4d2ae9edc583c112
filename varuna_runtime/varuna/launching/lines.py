"""Whole lines from several processes into one output: `print(a, b)` is several writes, and they would be mixed."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TextIO

__all__ = ["Relay", "Write", "to_stream"]

Write = Callable[[bytes], None]

_READ_BYTES = 65536


def to_stream(stream: TextIO) -> Write:
    """A writer of whole pieces to `stream`, for several threads; silent once nobody reads there any more."""
    lock = threading.Lock()

    def write(piece: bytes) -> None:
        with lock, suppress(BrokenPipeError):
            stream.flush()
            view = memoryview(piece)
            while view:
                view = view[os.write(stream.fileno(), view) :]

    return write


class Relay:
    """Threads that pass on what comes through pipes, line by line, until the pipes' other ends are closed."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def follow(self, process: subprocess.Popen[bytes], out: Write, err: Write) -> None:
        """Pass on what a process writes to its pipes, if it has them. A line may also end with a carriage return:
        progress bars are seen to move."""
        for source, write in ((process.stdout, out), (process.stderr, err)):
            if source is not None:
                name = f"lines-{process.pid}"
                thread = threading.Thread(target=_pass_on, args=(source, write), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def join(self, timeout_s: float) -> None:
        """Wait for the last lines of processes that have ended, at most so long for each."""
        for thread in self._threads:
            thread.join(timeout_s)


def _pass_on(source: IO[bytes], write: Write) -> None:
    rest = b""
    while piece := os.read(source.fileno(), _READ_BYTES):
        rest += piece
        whole = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if whole:
            write(rest[:whole])
            rest = rest[whole:]
    if rest:
        write(rest + b"\n")
