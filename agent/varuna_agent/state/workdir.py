"""The folder in which a job's workers run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workdir:
    path: str
    """The folder on this VM, when there is no archive."""
    archive: str = ""
    """SHA-256 of the packed folder."""
    setup: str = ""
    """A command that /bin/sh -c runs in the folder, once."""
    timeout_s: float = 0.0
    """Limit for making it ready, from the first byte of the archive to the end of the setup; 0: no limit."""

    @property
    def needs_work(self) -> bool:
        return bool(self.archive or self.setup)

    def content_key(self, environment: Mapping[str, str]) -> str:
        """The same for two workdirs with the same content. `environment`: the setup's."""
        content = [self.archive or self.path, self.setup, sorted(environment.items()) if self.setup else []]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
