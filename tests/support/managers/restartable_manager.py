"""A real manager that tests kill, stop and start again on the same data directory; its VMs live on meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from manager_world import PATIENT
from own_ports import own_ports
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from waiting import DEADLINE_S, wait_until


class RestartableManager:
    """A manager whose `processes` end with the test, VMs and workers too."""

    def __init__(
        self, processes: DemoProcesses, folder: Path, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._environment = environment
        self._processes = processes
        self._options = ["--data-dir", str(folder), *PATIENT, *options]
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.is_up = False
        """Whether it runs: neither killed nor standing still."""

    @property
    def url(self) -> str:
        """The same after every start: the manager keeps its ports."""
        return f"http://{json.loads((self.folder / 'manager.json').read_text())['http']}"

    @property
    def log(self) -> Path:
        """Of the newest start."""
        return self.folder / f"manager-{self._starts}.log"

    def start(self, *, leads: bool = True) -> None:
        """Returns when it answers, and (unless it is to stand by) leads."""
        process = self.launch()

        def answers() -> bool:
            assert process.poll() is None, self.log.read_text()
            if not (self.folder / "manager.json").exists():
                return False
            return self.leads() if leads else self.lives()

        wait_until(answers, "the manager")
        self.is_up = True

    def launch(self) -> subprocess.Popen[bytes]:
        """Start its process, and wait for nothing."""
        self._starts += 1
        # Later starts keep the ports of the first one, which nobody else may have taken meanwhile.
        http, grpc = (0, 0) if (self.folder / "manager.json").exists() else own_ports(2)
        ports = ["--http-port", str(http), "--grpc-port", str(grpc)]
        arguments = ["-m", "varuna_client.cli", "manager", *ports, *self._options]
        self._process = self._processes.start(arguments, self.log, self._environment)
        return self._process

    def runs(self) -> bool:
        """Whether there is a process of it."""
        return self._process is not None and self._process.poll() is None

    def lives(self) -> bool:
        """Whether the process answers, in whatever role."""
        try:
            return httpx.get(f"{self.url}/healthz", trust_env=False, timeout=DEADLINE_S).status_code == 200
        except httpx.TransportError:
            return False

    def leads(self) -> bool:
        with self.client() as client:
            return client.is_ready()

    def kill(self) -> None:
        """SIGKILL: nobody is notified."""
        assert self._process is not None
        self.is_up = False
        self._process.kill()
        self._process.wait()

    def stand_still(self) -> None:
        """SIGSTOP: it does nothing, and keeps its connections."""
        assert self._process is not None
        self.is_up = False
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self.is_up = True
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def client(self) -> Iterator[Client]:
        with Client(self.url, timeout_s=DEADLINE_S) as client:
            yield client
