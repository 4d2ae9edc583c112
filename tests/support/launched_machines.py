"""Machines that another launcher than Varuna's uses: launcher processes on this machine, which train examples/gpt.

What the ranks print tells which steps they have made, and in which shapes. The reference is plain PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from repository import ROOT
from waiting import DEADLINE_S, wait_until

__all__ = ["FOREVER", "Machines", "assert_losses", "find_free_port", "list_losses", "list_plans"]

FOREVER = ("--steps", "1000000")
"""The script's arguments for a training that the test ends."""

_STEP = re.compile(r"^step (\d+) loss ([\d.]+)$", re.MULTILINE)
_SHAPE = re.compile(r"(\d+×\d+), micro-batch .* shapes? for (\d+) GPU")


class Machines:
    """Launchers, each with its log. All that they have started ends with `end`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[psutil.Popen] = []
        self._family: set[psutil.Process] = set()

    @property
    def environ(self) -> dict[str, str]:
        """For launchers: this Python's programs, and a checkpoint store."""
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VARUNA_CHECKPOINT_URL": str(self._folder / "store"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> psutil.Popen:
        """Starts a launcher in the repository's folder. `environ`: more variables for it."""
        with (self._folder / f"machine{len(self._started)}.log").open("w") as log:
            machine = psutil.Popen(
                list(command), cwd=ROOT, env={**self.environ, **(environ or {})}, stdout=log, stderr=log
            )
        self._started.append(machine)
        return machine

    def kill(self, machine: psutil.Process) -> None:
        """As a power cut would."""
        self._remember_family()
        with contextlib.suppress(psutil.NoSuchProcess):
            children = machine.children(recursive=True)
            machine.kill()
            for process in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _remember_family(self) -> None:
        for machine in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._family.update(machine.children(recursive=True))

    def read_logs(self) -> list[str]:
        """Of all machines, also those that are gone."""
        self._remember_family()
        return [path.read_text() for path in sorted(self._folder.glob("machine*.log"))]

    def wait_for_steps(self, machines: int, *, after: int) -> int:
        """Waits until a shape for so many machines has made two steps, and returns the number of plans so far.

        `after`: the number of plans before that shape, which do not count.
        """

        def look() -> int | None:
            logs = self.read_logs()
            plans = len(list_plans(logs))
            for text in logs:
                shapes = list(_SHAPE.finditer(text))
                if plans > after and shapes and shapes[-1][2] == str(machines):
                    steps = {step for step, _ in _STEP.findall(text, shapes[-1].end())}
                    if len(steps) >= 2:
                        return plans
            return None

        return int(wait_until(look, f"two steps on {machines} machines"))

    def end(self) -> None:
        for machine in self._started:
            self.kill(machine)
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for machine in self._started:
            machine.wait(DEADLINE_S)


def list_plans(logs: Iterable[str]) -> list[tuple[str, int]]:
    """Of each start: the shape, and for how many ranks it was planned."""
    return [(shape, int(ranks)) for text in logs for shape, ranks in _SHAPE.findall(text)]


def list_losses(logs: Iterable[str]) -> list[tuple[int, float]]:
    """Step and loss, as all ranks have printed them."""
    return [(int(step), float(loss)) for text in logs for step, loss in _STEP.findall(text)]


def assert_losses(losses: Sequence[tuple[int, float]], folder: Path) -> None:
    """That every step from the first on was made, and that its loss is that of an uninterrupted run of plain PyTorch.

    `folder`: for files.
    """
    last = max(step for step, _ in losses)
    assert {step for step, _ in losses} == set(range(1, last + 1))
    out = folder / "reference.json"
    command = [str(ROOT / "examples" / "gpt" / "reference.py"), "--steps", str(last), "--out", str(out)]
    subprocess.run([sys.executable, *command], check=True, timeout=DEADLINE_S)
    reference = json.loads(out.read_text())["losses"]
    for step, loss in losses:
        assert loss == pytest.approx(reference[step - 1], rel=1e-4), f"step {step}"


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
