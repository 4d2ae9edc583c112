"""Helpers of the end-to-end tests: the `varuna` command, a manager with local VMs, waiting for a condition."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
DEADLINE_S = 60.0


def run_varuna(*arguments: str, url: str = "", timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """The `varuna` command as a user runs it, in the repository's folder."""
    return subprocess.run(
        [str(PROGRAMS / "varuna"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
        env={**os.environ, "VARUNA_MANAGER_URL": url, "COLUMNS": "160"},
    )


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The condition's first true value."""
    give_up = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {deadline_s} s"
        time.sleep(0.1)
    return value


@dataclass(frozen=True)
class RunningManager:
    """A manager that answers at `url` and keeps its files in `folder`."""

    url: str
    folder: Path
    processes: DemoProcesses

    def varuna(self, *arguments: str, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        return run_varuna(*arguments, url=self.url, timeout_s=timeout_s)


def all_ready(client: Client, count: int) -> bool:
    return sum(vm["state"] == "ready" for vm in client.vms()) >= count
