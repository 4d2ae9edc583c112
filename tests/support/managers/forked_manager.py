"""Managers that are forked from a process that has imported all that they need: manager_zygote.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from waiting import DEADLINE_S, POLL_S, wait_until

_PROGRAM = Path(__file__).with_name("manager_zygote.py")


class ManagerZygote:
    """The process from which managers are forked."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="varuna-managers-")
        self._process = subprocess.Popen([sys.executable, str(_PROGRAM)], stdin=subprocess.PIPE, text=True)
        self._started = 0

    def start(self, arguments: Sequence[str], log: Path) -> ForkedManager:
        """A manager with this environment and working directory. `log`: what it writes to stderr is appended there."""
        self._started += 1
        spec = Path(self._folder.name) / f"{self._started}.json"
        place = {"log": str(log.absolute()), "environ": {**os.environ}, "cwd": str(Path.cwd())}
        spec.write_text(json.dumps({"arguments": arguments, **place}))
        assert self._process.stdin is not None
        self._process.stdin.write(f"{spec}\n")
        self._process.stdin.flush()
        return ForkedManager(spec)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._folder.cleanup()


class ForkedManager:
    """A manager's process, with the part of `subprocess.Popen` that tests use. It is no child of this process."""

    def __init__(self, spec: Path) -> None:
        self._end = spec.with_suffix(".code")
        self.pid = int(wait_until(lambda: _read(spec.with_suffix(".pid")), "the manager's process"))

    def poll(self) -> int | None:
        code = _read(self._end)
        return int(code) if code else None

    def wait(self, timeout: float = DEADLINE_S) -> int:
        give_up = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("varuna manager", timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
