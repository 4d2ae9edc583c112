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
        self._pipes: list[_Pipe] = []

    def relay_process(self, process: subprocess.Popen[bytes], out: ByteWriter, err: ByteWriter) -> None:
        """Passes on what a process writes to its pipes, if it has any. A line may also end with a carriage return, so
        that progress bars are seen to move."""
        for source, write in ((process.stdout, out), (process.stderr, err)):
            if source is not None:
                self._pipes.append(_Pipe(source, write, name=f"lines-{process.pid}"))

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits for the last lines of processes that have ended.

        At most `timeout_s` for a pipe that another process still has, and for an output that takes nothing in that
        time.
        """
        for pipe in self._pipes:
            looks, written = 0, 0
            while looks < _LOOKS and not pipe.has_ended_within(timeout_s / _LOOKS):
                looks += 1  # a process that stood still has missed one of them
                before, written = written, sum(pipe.written for pipe in self._pipes)
                if pipe.is_closed_beyond() and (written > before or not pipe.is_writing):
                    looks = 0  # its thread has only to get its turn


class _Pipe:
    """One pipe, and the thread that passes on what comes through it."""

    def __init__(self, source: IO[bytes], write: ByteWriter, *, name: str) -> None:
        self._source, self._write = source, write
        self.is_writing = False
        self.written = 0
        """How often the output has taken a piece."""
        self._thread = threading.Thread(target=self._pass_on, name=name, daemon=True)
        self._thread.start()

    def has_ended_within(self, timeout_s: float) -> bool:
        """Whether all is passed on, in that time at the latest."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_closed_beyond(self) -> bool:
        """Whether no process has the other end any longer, so that only what is in the pipe can still come."""
        look = select.poll()
        look.register(self._source, 0)  # the end of the pipe is always looked for
        return bool(look.poll(0))

    def _pass_on(self) -> None:
        rest = b""
        while piece := os.read(self._source.fileno(), _READ_BYTES):
            rest += piece
            whole = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
            if whole:
                self._write_piece(rest[:whole])
                rest = rest[whole:]
        if rest:
            self._write_piece(rest + b"\n")

    def _write_piece(self, piece: bytes) -> None:
        self.is_writing = True
        self._write(piece)
        self.written += 1
        self.is_writing = False
