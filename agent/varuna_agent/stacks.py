"""Where a worker's Python threads stand, without its help: for a worker that hangs.

Each worker has the writing end of a pipe, and Python's faulthandler on a real-time signal (the zygote sees to that
before the script begins; in a worker that a shell started, `import varuna` does). The handler is C code in the worker:
it also runs while a thread holds the interpreter's lock, waits for another lock, or is inside a library's call.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from varuna_agent.guard import STACKS_SIGNAL

MAX_TEXT_BYTES = 64 * 1024
_PIPE_BYTES = 256 * 1024
_ANSWER_S = 3.0
_QUIET_S = 0.2
"""faulthandler writes line by line and marks no end: one that has said nothing for this long has said all."""
_LOOK_EVERY_S = 0.02


class NoStacksError(Exception):
    """The worker cannot be asked, or does not answer; says why."""


class StackPipe:
    """The agent's end of one worker's pipe. `theirs` goes to the worker, and is closed here when it has started."""

    def __init__(self) -> None:
        self._read, self.theirs = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self.theirs, False)  # a worker must not wait in its handler for an agent that does not read
        with suppress(OSError):  # more than the system allows to this user: then what it is
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._one_at_a_time = asyncio.Lock()

    @property
    def variable(self) -> dict[str, str]:
        """What a worker that a shell starts is told, for `varuna.stacks`."""
        return {"VARUNA_STACKS": f"{STACKS_SIGNAL}:{self.theirs}"}

    def started(self) -> None:
        """The worker has its end, or never will."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def close(self) -> None:
        self.started()
        read, self._read = self._read, -1
        os.close(read)

    async def ask(self, pid: int) -> str:
        """The stacks of all threads of process `pid`, which has this pipe. Raises NoStacksError."""
        async with self._one_at_a_time:
            self._take()  # what a late answer to an earlier question has left
            _signal(pid)
            text = await self._answer()
        if not text:
            raise NoStacksError(f"process {pid} did not answer within {_ANSWER_S:g} s: it is {_state(pid)}")
        kept = text[:MAX_TEXT_BYTES].decode(errors="replace")
        return kept if len(text) <= MAX_TEXT_BYTES else f"{kept}\n... and more"

    async def _answer(self) -> bytes:
        text, now = b"", time.monotonic()
        quiet_at = now + _ANSWER_S
        while now < quiet_at and len(text) < _PIPE_BYTES and self._read >= 0:
            await asyncio.sleep(_LOOK_EVERY_S)
            more, now = self._take(), time.monotonic()
            if more:
                text += more
                quiet_at = now + _QUIET_S
        return text

    def _take(self) -> bytes:
        try:
            return b"" if self._read < 0 else os.read(self._read, _PIPE_BYTES)  # below 0: it has ended meanwhile
        except BlockingIOError:
            return b""


def _signal(pid: int) -> None:
    """Not to a process that has not prepared for it: the signal would end it. Raises NoStacksError."""
    if STACKS_SIGNAL <= 0:
        raise NoStacksError("this system has no real-time signals")
    try:
        caught = int(_status(pid)["SigCgt"], 16)
        if not caught >> (STACKS_SIGNAL - 1) & 1:
            raise NoStacksError(
                f"process {pid} cannot be asked: its command needs a shell, and the Python in it has not imported "
                "varuna yet"
            )
        os.kill(pid, STACKS_SIGNAL)
    except (OSError, KeyError) as error:
        raise NoStacksError(f"process {pid} cannot be asked: {error}") from error


def _state(pid: int) -> str:
    """What the kernel says that the process does, and waits for."""
    try:
        state = _status(pid)["State"]
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
    except (OSError, KeyError):
        return "gone"
    return state if waits_in in ("", "0") else f"{state}, in the kernel's {waits_in}"


def _status(pid: int) -> dict[str, str]:
    """Of /proc. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
