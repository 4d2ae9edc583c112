"""Helpers of the end-to-end tests: the `varuna` command, a manager with local VMs, waiting for a condition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from repository import ROOT
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_proto.rest import GenerationDocument
from waiting import DEADLINE_S, wait_until

PROGRAMS = Path(sys.executable).parent


PATIENT = ("--suspect-after-s", "30", "--lost-after-s", "50", "--lease-s", "600", "--hang-minimum-s", "300")
"""For tests that are not about silence: on a busy machine a VM may be silent, a job slow, and a manager that is started
again away, for a long time."""


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

    def client(self) -> Client:
        return Client(self.url, timeout_s=DEADLINE_S)

    def varuna(
        self, *arguments: str, timeout_s: float = DEADLINE_S, folder: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        return run_varuna(*arguments, url=self.url, timeout_s=timeout_s, folder=folder)


def process_of_last_rank(client: Client, job: str) -> int:
    """The process of the VM on which the last rank of the job's training runs, or is about to."""

    def vm_of_last_rank() -> str | None:
        newest = client.generations(job)[-1:]
        if not newest or newest[0]["kind"] != "training":
            return None
        return max(newest[0]["placement"], key=lambda place: place["rank"])["vm_id"]

    vm_id = wait_until(vm_of_last_rank, f"the training of {job}")
    return int(next(vm["ref"]["pid"] for vm in client.vms() if vm["id"] == vm_id))


def all_ready(client: Client, count: int) -> bool:
    return sum(vm["state"] == "ready" for vm in client.vms()) >= count


@contextmanager
def start_manager(folder: Path, vms: int, *options: str) -> Iterator[Client]:
    """A manager with so many local VMs, all of them ready, on free ports; its files are in `folder / "manager"`."""
    data = folder / "manager"
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with DemoProcesses(data) as processes:
        arguments = ["-m", "varuna_client.cli", "manager", "--data-dir", str(data), *ports, "--vms", str(vms), *options]
        processes.start(arguments, folder / "manager.log")
        document = wait_until(lambda: _read_document(data / "manager.json"), "the manager's address")
        with Client(f"http://{document['http']}", timeout_s=DEADLINE_S) as client:
            wait_until(lambda: client.is_ready() and all_ready(client, vms), "the manager and its VMs")
            yield client


def _read_document(path: Path) -> dict[str, str] | None:
    return json.loads(path.read_text()) if path.exists() else None


def find_training(client: Client, job: str, after: int, *, steps: int) -> GenerationDocument | None:
    """The generation after that number, once it has made so many steps."""
    for generation in client.generations(job):
        is_later = generation["kind"] == "training" and generation["number"] > after
        if is_later and (generation["last_step"] or 0) >= (generation["resumed_step"] or 0) + steps:
            return generation
    return None


def find_copied(client: Client, job: str, number: int) -> GenerationDocument | None:
    """The generation, once other VMs have copies of all its stages."""
    [generation] = [one for one in client.generations(job) if one["number"] == number]
    return generation if generation["copied_step"] else None


def kill_vm(client: Client, vm_id: str) -> None:
    agent = psutil.Process(next(vm["ref"]["pid"] for vm in client.vms() if vm["id"] == vm_id))
    for process in [agent, *agent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
