"""The newest generation of each job that this VM has seen, kept over restarts of the agent.

So an agent that comes back still refuses what is over. The file survives the agent, SIGKILL included; it is not forced
to the disk, since when the VM itself goes down its workers go as well, and the manager knows them by the incarnation.
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
        """By job, the one seen last at the end. Empty when there is no file, or none that can be read."""
        try:
            document = json.loads(self._path.read_text())
            return {str(job_id): int(generation) for job_id, generation in document.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            _log.warning("generations seen before are not known", path=str(self._path), error=str(error))
            return {}

    def write(self, seen: Mapping[str, int]) -> None:
        """Whole or not at all. A disk that takes nothing more is no reason to stop training."""
        part = self._path.with_name(self._path.name + ".part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(dict(seen), file)
            part.replace(self._path)
        except OSError as error:
            _log.warning("generations seen are not kept", path=str(self._path), error=str(error))
