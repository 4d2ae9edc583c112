"""The newest generation of each job that this VM has seen, kept over restarts of the agent.

So a restarted agent still refuses generations that are over. The file survives the agent, SIGKILL included. It is not
synced to the disk: when the VM itself goes down its workers end, too, and the manager sees a new incarnation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import structlog

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class SeenGenerations:
    """One file in the agent's folder."""

    def __init__(self, vm_dir: Path) -> None:
        self._path = vm_dir / "seen.json"

    def read(self) -> dict[str, int]:
        """Generations by job, the one seen last at the end; empty if there is no readable file."""
        try:
            document = json.loads(self._path.read_text())
            return {str(job_id): int(generation) for job_id, generation in document.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            _log.warning("the seen generations cannot be read", path=str(self._path), error=str(error))
            return {}

    def write(self, seen: Mapping[str, int]) -> None:
        """Write the file whole or not at all. A full disk does not stop training."""
        part = self._path.with_name(self._path.name + ".part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(dict(seen), file)
            part.replace(self._path)
        except OSError as error:
            _log.warning("the seen generations cannot be written", path=str(self._path), error=str(error))
