"""`varuna manager --provider ...` with real VMs: a trace that is replayed, a list of hosts, and wrong ones."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manager_world import run_varuna
from restartable_manager import RestartableManager
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("e2e")
REFUSAL = re.compile(
    r"(\d) VMs? (?:is|are) missing and the provider refused \(capacity\): "
    r"the local market grants (\d) VMs?, and has granted (\d)"
)


def states(client: Client) -> dict[str, Any]:
    return {vm["id"]: vm["state"] for vm in client.vms(gone=True)}


@pytest.mark.slow
def test_a_trace_brings_and_takes_vms_also_while_the_manager_is_away(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,n1\n0,add,n2\n2400000,remove,n1\n3000000,add,n3\n")
    provider = ["--provider", f"replay:{trace}", "--vms", "5"]
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, tmp_path / "data", *provider)
        (tmp_path / "data").mkdir()
        manager.start()
        with manager.client() as client:
            wait_until(lambda: {"local-1", "local-2"} <= states(client).keys(), "the two VMs of the trace's beginning")

            def refusals() -> list[str]:
                return [event["message"] for event in client.events() if event["kind"] == "provider_refused"]

            found = REFUSAL.fullmatch(wait_until(refusals, "the provider's refusal")[0])
            assert found is not None
            missing, granted, there = map(int, found.groups())
            assert missing == 5 - there
            assert granted == there
            manager.kill()
            # The rest of the trace is over ten seconds after its beginning, and not in fifty minutes.
            RestartableManager(processes, manager.folder, *provider, "--replay-speed", "300").start()
            expected = {"local-1": "gone", "local-2": "ready", "local-3": "ready"}
            wait_until(lambda: states(client) == expected, "the trace's last fleet")


def test_a_listed_host_is_missing_until_its_agent_comes(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts:\n  - {name: gpu-1, gpus: 2}\n  - {name: gpu-2}\n")
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, tmp_path / "data", "--provider", f"static:{hosts}")
        (tmp_path / "data").mkdir()
        manager.start()
        with manager.client() as client:
            wait_until(lambda: states(client) == {"gpu-1": "requested", "gpu-2": "requested"}, "the list")
            address = json.loads((tmp_path / "data" / "manager.json").read_text())["grpc"]

            def agent(name: str, gpus: int) -> subprocess.Popen[bytes]:
                options = ["--manager", address, "--vm-id", name, "--vm-dir", str(tmp_path / name), "--gpus", str(gpus)]
                return processes.start(["-m", "varuna_agent.main", *options], tmp_path / f"{name}.log")

            agent("gpu-1", 2)
            stranger = agent("gpu-9", 1)
            assert stranger.wait(DEADLINE_S) == 1
            assert "none of this manager's" in (tmp_path / "gpu-9.log").read_text()
            wait_until(lambda: states(client) == {"gpu-1": "ready", "gpu-2": "requested"}, "the agent of gpu-1")
            vms = {vm["id"]: vm for vm in client.vms()}
            assert "missing" in vms["gpu-2"]["reason"]
            assert vms["gpu-1"]["gpus"] == 2


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ("replay:/nowhere.csv", "trace /nowhere.csv cannot be read (No such file or directory)"),
        ("static:/nowhere.yaml", "list of hosts /nowhere.yaml cannot be read (No such file or directory)"),
    ],
)
def test_a_wrong_file_of_a_provider_is_refused_in_one_line(provider: str, message: str) -> None:
    result = run_varuna("manager", "--provider", provider)
    assert result.returncode == 2
    assert result.stderr == f"varuna manager: --provider {provider!r}: {message}\n"


def test_an_unknown_provider_is_refused_in_one_line_with_those_that_there_are() -> None:
    result = run_varuna("manager", "--provider", "cloud")
    assert result.returncode == 2
    assert result.stderr.startswith("varuna manager: --provider 'cloud': expected local, replay:TRACE.csv, azure:")
    assert result.stderr.count("\n") == 1
    assert {"azure:SETTINGS.yaml", "static:HOSTS.yaml"} <= set(result.stderr.replace(",", " ").split())
