"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from manager_world import PATIENT, RunningManager, all_ready
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def running_manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningManager]:
    """`varuna manager` with two VMs, on free ports."""
    folder = tmp_path_factory.mktemp("manager")
    options = ["--data-dir", str(folder), "--http-port", "0", "--grpc-port", "0", "--vms", "2", *PATIENT]
    with DemoProcesses(folder) as processes:
        process = processes.start(["-m", "varuna_client.cli", "manager", *options], folder / "manager.log")

        def address() -> str | None:
            assert process.poll() is None, (folder / "manager.log").read_text()
            path = folder / "manager.json"
            return f"http://{json.loads(path.read_text())['http']}" if path.exists() else None

        url = wait_until(address, "the manager's address")
        with Client(url, timeout_s=DEADLINE_S) as client:
            wait_until(lambda: client.is_ready() and all_ready(client, 2), "the manager and its VMs")
        yield RunningManager(url, folder, processes)
