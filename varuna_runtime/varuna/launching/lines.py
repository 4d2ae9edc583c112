"""Whole lines from several processes into one output: `print(a, b)` is several writes, which would get mixed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TextIO

__all__ = ["ByteWriter", "LineRelay", "make_stream_writer"]

ByteWriter = Callable[[bytes], None]

_READ_BYTES = 65536
_LOOKS = 20


def make_stream_writer(stream: TextIO) -> ByteWriter:
    """A writer of whole pieces to `stream`, for several threads.

    It drops what cannot be written, because a process whose output nobody takes stands still at its next line. It
    reports the first error on standard error, unless it is that the reader is gone.
    """
    lock = threading.Lock()
    has_failed = False

    def write(piece: bytes) -> None:
        nonlocal has_failed
        with lock:
            try:
                stream.flush()
                _write_all(stream.fileno(), piece)
            except BrokenPipeError:
                pass
            except OSError as error:
                if not has_failed:
                    has_failed = True
                    _report_loss(error)

    return write


def _write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process with the same pipe or terminal has made it so
            select.select([], [descriptor], [])


def _report_loss(error: OSError) -> None:
    with suppress(OSError):  # it may be standard error that cannot be written
        text = f"varuna: lines are lost while the output cannot be written: {error.strerror or error}\n"
        os.write(sys.stderr.fileno(), text.encode())


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
