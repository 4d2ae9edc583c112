"""Helpers of the end-to-end tests: the `varuna` command, a manager with local VMs, waiting for a condition."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from waiting import DEADLINE_S

PROGRAMS = Path(sys.executable).parent


PATIENT = ("--suspect-after-s", "30", "--lost-after-s", "50", "--hang-minimum-s", "300")
"""For tests that are not about silence: on a busy machine a VM may be silent, and a job slow, for a long time."""


def run_varuna(
    *arguments: str, url: str = "", timeout_s: float = DEADLINE_S, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The `varuna` command as a user runs it in `folder`, which is the repository's by default."""
    return subprocess.run(
        [str(PROGRAMS / "varuna"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=folder,
        env={**os.environ, "VARUNA_MANAGER_URL": url, "COLUMNS": "160"},
    )


@dataclass(frozen=True)
class RunningManager:
    """A manager that answers at `url` and keeps its files in `folder`."""

    url: str
    folder: Path
    processes: DemoProcesses

    def varuna(
        self, *arguments: str, timeout_s: float = DEADLINE_S, folder: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        return run_varuna(*arguments, url=self.url, timeout_s=timeout_s, folder=folder)


def all_ready(client: Client, count: int) -> bool:
    return sum(vm["state"] == "ready" for vm in client.vms()) >= count
