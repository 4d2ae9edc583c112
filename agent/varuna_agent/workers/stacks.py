"""Reads where a worker's Python threads stand, without the worker's help, because it may hang.

Each worker has the writing end of a pipe, and Python's faulthandler on a real-time signal. The zygote registers it
before the script begins; in a worker that a shell started, `import varuna` does. The handler is C code in the worker:
it runs even while a thread holds the interpreter's lock, waits for another lock, or is inside a library call.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from varuna_agent.workers.guard import STACKS_SIGNAL

MAX_TEXT_BYTES = 64 * 1024
_PIPE_BYTES = 256 * 1024
_ANSWER_S = 3.0
_QUIET_S = 0.2
"""faulthandler writes line by line and marks no end: after this long without a line the dump is complete."""
_POLL_S = 0.02


class NoStacksError(Exception):
    """The worker cannot be asked, or does not answer; the text says why."""


class StackPipe:
    """The agent's end of one worker's pipe. The worker inherits `worker_end`, which closes here after its start."""

    def __init__(self) -> None:
        self._read, self.worker_end = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self.worker_end, False)  # a worker must not wait in its handler for an agent that does not read
        with suppress(OSError):  # the system allows this user less
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._one_at_a_time = asyncio.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """The variable for `varuna.diagnostics.stacks` in a worker that a shell starts."""
        return {"VARUNA_STACKS": f"{STACKS_SIGNAL}:{self.worker_end}"}

    def close_worker_end(self) -> None:
        """The worker has started, or never will. Idempotent."""
        if self.worker_end >= 0:
            os.close(self.worker_end)
            self.worker_end = -1

    def close(self) -> None:
        self.close_worker_end()
        read, self._read = self._read, -1
        os.close(read)

    async def read_stacks(self, pid: int) -> str:
        """Read the stacks of all threads of process `pid`, which has this pipe. Raises NoStacksError."""
        async with self._one_at_a_time:
            self._read_available()  # discards a late answer to an earlier request
            _send_signal(pid)
            text = await self._receive_dump()
        if not text:
            raise NoStacksError(f"process {pid} did not answer within {_ANSWER_S:g} s: it is {_describe_state(pid)}")
        kept = text[:MAX_TEXT_BYTES].decode(errors="replace")
        return kept if len(text) <= MAX_TEXT_BYTES else f"{kept}\n... and more"

    async def _receive_dump(self) -> bytes:
        text, now = b"", time.monotonic()
        quiet_at = now + _ANSWER_S
        while now < quiet_at and len(text) < _PIPE_BYTES and self._read >= 0:
            await asyncio.sleep(_POLL_S)
            more, now = self._read_available(), time.monotonic()
            if more:
                text += more
                quiet_at = now + _QUIET_S
        return text

    def _read_available(self) -> bytes:
        try:
            return b"" if self._read < 0 else os.read(self._read, _PIPE_BYTES)  # below 0: the worker has ended
        except BlockingIOError:
            return b""


def _send_signal(pid: int) -> None:
    """Send the signal only to a process that handles it, because it would end any other. Raises NoStacksError."""
    if STACKS_SIGNAL <= 0:
        raise NoStacksError("this system has no real-time signals")
    try:
        caught = int(_read_status(pid)["SigCgt"], 16)
        if not caught >> (STACKS_SIGNAL - 1) & 1:
            raise NoStacksError(
                f"process {pid} cannot be asked: its command needs a shell, and the Python in it has not imported "
                "varuna yet"
            )
        os.kill(pid, STACKS_SIGNAL)
    except (OSError, KeyError) as error:
        raise NoStacksError(f"process {pid} cannot be asked: {error}") from error


def _describe_state(pid: int) -> str:
    """The process's state in the kernel, and where it waits."""
    try:
        state = _read_status(pid)["State"]
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
    except (OSError, KeyError):
        return "gone"
    return state if waits_in in ("", "0") else f"{state}, in the kernel's {waits_in}"


def _read_status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status. Raises OSError."""
    # A process gives itself any bytes for a name.
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
