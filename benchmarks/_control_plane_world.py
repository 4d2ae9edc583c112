"""A real manager's process over a filled store, and processes with simulated agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from _control_plane_store import RANKS_PER_JOB, fill, sqlite_url, vm_id

_AGENTS = Path(__file__).with_name("_control_plane_agents.py")
_START_S, _CONNECT_S = 120.0, 600.0
_DIALS_PER_S = 100.0
"""The first connections are spread over this time, because a fleet's machines do not boot at the same moment."""


@dataclass
class ManagerProcess:
    """Killed and started again on the same folder it takes the same ports."""

    folder: Path
    flags: tuple[str, ...]
    process: psutil.Popen | None = None
    _starts: int = 0

    def start(self) -> None:
        """Returns when it serves agents."""
        self._starts += 1
        log = self.folder / f"manager-{self._starts}.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "varuna_manager.main", "--data-dir", str(self.folder), *self.flags]
            self.process = psutil.Popen(command, stdout=output, stderr=output)
        give_up = time.monotonic() + _START_S
        while not (b"the manager serves" in log.read_bytes() or b"leads" in log.read_bytes()):
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the manager did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)

    @property
    def address(self) -> str:
        return str(json.loads((self.folder / "manager.json").read_text())["grpc"])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def cpu_s(self) -> float:
        assert self.process is not None
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def memory_mb(self) -> float:
        assert self.process is not None
        return float(self.process.memory_info().rss / 1e6)


@dataclass
class Fleet:
    """Processes with simulated agents."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def ask(self, command: str) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(command + "\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a process of agents ended: see above")
            answers.append(json.loads(line))
        return answers

    def cpu_s(self) -> float:
        return float(sum(answer["cpu_s"] for answer in self.ask("connected")))

    def await_connected(self, count: int) -> float:
        """Seconds until this many are connected."""
        began = time.monotonic()
        while (now := sum(answer["connected"] for answer in self.ask("connected"))) < count:
            if time.monotonic() - began > _CONNECT_S:
                lost = [reason for answer in self.ask("report") for reason in answer["lost"]][:3]
                raise RuntimeError(f"only {now} of {count} agents connected in {_CONNECT_S:.0f} s: {lost}")
            time.sleep(0.2)
        return time.monotonic() - began

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def world(
    folder: Path, agents: int, jobs: int, interval_s: float, *, mtls: bool, processes: int = 1
) -> Iterator[tuple[ManagerProcess, Fleet]]:
    """`agents` that are all connected, each with a heartbeat every `interval_s`; `jobs`×RANKS_PER_JOB of them work."""
    fill(sqlite_url(folder), agents, jobs, "static")
    hosts = folder / "hosts.yaml"
    hosts.write_text(yaml.safe_dump({"hosts": [{"name": vm_id(number)} for number in range(agents)]}))
    flags = ["--provider", f"static:{hosts}", "--http-port", "0", "--grpc-port", "0", "--log-level", "info"]
    flags += ["--heartbeat-interval-s", f"{interval_s:g}", "--suspect-after-s", f"{5 * interval_s:g}"]
    flags += ["--lost-after-s", f"{10 * interval_s:g}", "--lease-s", f"{60 * interval_s:g}", "--hang-minimum-s", "1e9"]
    manager, fleet = ManagerProcess(folder, (*flags, *(["--secure"] if mtls else []))), Fleet()
    try:
        manager.start()
        pki = ["--pki", str(folder / "pki")] if mtls else []
        for arguments in _shares(agents, processes):
            command = [sys.executable, str(_AGENTS), "--address", manager.address, *arguments]
            command += ["--working", str(jobs * RANKS_PER_JOB), "--spread-s", f"{agents / _DIALS_PER_S:g}", *pki]
            fleet.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "GRPC_VERBOSITY": "NONE"},
                )
            )
        fleet.await_connected(agents)
        yield manager, fleet
    finally:
        fleet.close()
        manager.kill()


def _shares(agents: int, processes: int) -> Iterator[Sequence[str]]:
    each = -(-agents // processes)
    for first in range(0, agents, each):
        yield ("--first", str(first), "--count", str(min(each, agents - first)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
