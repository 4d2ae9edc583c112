"""Logs that a running worker opens itself, because its process was assigned another rank."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from pathlib import Path

from varuna_agent.logs import log_files
from varuna_agent.workers.isolation import JobUser

_OPEN_WITHIN_S = 30.0
"""A worker opens its log before it says hello, for which it has less time."""


class SharedLogs:
    """Makes logs that workers can open.

    The folders of the logs are closed to other users than the agent's. So a worker of another user gets a second name
    of the file for a while, which no process can guess, in a folder that none can list.
    """

    def __init__(self, vm_dir: Path, user: JobUser | None) -> None:
        self._folder = vm_dir.resolve() / "shared"
        self._user = user
        shutil.rmtree(self._folder, ignore_errors=True)

    def make_log(self, log: Path) -> Path:
        """Make the log and its folders; returns the path by which the worker can open it. Raises OSError."""
        os.close(log_files.open_log(log, self._user))
        if self._user is None:
            return log.resolve()
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o711)
        shared = self._folder / f"{secrets.token_hex(16)}.log"
        os.link(log, shared, follow_symlinks=False)
        asyncio.get_running_loop().call_later(_OPEN_WITHIN_S, shared.unlink, True)
        return shared
