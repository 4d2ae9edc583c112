"""What a job's workers run in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workdir:
    path: str
    """Where it is on this VM, when there is no archive."""
    archive: str = ""
    """SHA-256 of the packed folder."""
    setup: str = ""
    """Run by /bin/sh -c in the folder, once."""
    timeout_s: float = 0.0
    """For making it ready, from the first byte of the archive to the end of the setup; 0: as long as it takes."""

    @property
    def needs_work(self) -> bool:
        return bool(self.archive or self.setup)

    def key(self, environment: Mapping[str, str]) -> str:
        """What two of the same content have in common; `environment`: of the setup."""
        said = [self.archive or self.path, self.setup, sorted(environment.items()) if self.setup else []]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
