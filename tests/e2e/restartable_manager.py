"""A real manager that tests kill and start again on the same data directory; its VMs live on meanwhile."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manager_world import wait_until
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses


class RestartableManager:
    """`processes` ends whatever is left, VMs and workers too."""

    def __init__(self, processes: DemoProcesses, folder: Path, *options: str) -> None:
        self.folder = folder
        self._processes = processes
        self._options = ["--data-dir", str(folder), "--http-port", "0", "--grpc-port", "0", *options]
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The same after every start: the manager keeps its ports."""
        return f"http://{json.loads((self.folder / 'manager.json').read_text())['http']}"

    @property
    def log(self) -> Path:
        """Of the newest start."""
        return self.folder / f"manager-{self._starts}.log"

    def start(self) -> None:
        """Returns when it answers."""
        self._starts += 1
        arguments = ["-m", "varuna_client.cli", "manager", *self._options]
        self._process = process = self._processes.start(arguments, self.log)

        def answers() -> bool:
            assert process.poll() is None, self.log.read_text()
            if not (self.folder / "manager.json").exists():
                return False
            with self.client() as client:
                return client.ready()

        wait_until(answers, "the manager")

    def kill(self) -> None:
        """SIGKILL: nothing is said to anyone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def client(self) -> Iterator[Client]:
        with Client(self.url) as client:
            yield client
