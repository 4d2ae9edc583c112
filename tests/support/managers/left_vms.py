"""Local VMs that a manager has left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil


def kill_left_vms(folder: Path) -> None:
    """Kill the process groups of the VMs in `folder`. The numbers of those that have ended may be others' by now."""
    for file in folder.glob("*/vm.json"):
        vm = json.loads(file.read_text())
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if abs(psutil.Process(vm["pid"]).create_time() - vm["process_created_at"]) < 2.0:
                os.killpg(vm["pid"], signal.SIGKILL)
