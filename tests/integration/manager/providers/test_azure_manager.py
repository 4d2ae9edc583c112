"""The whole life of a VM of Azure: it is requested, installs its agent from the manager, joins, and is evicted.

Azure is the fake Resource Manager; the VM is a folder in which its cloud-init document is carried out.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fake_arm import FakeArm, fake_arm
from repository import ROOT, WORKERS
from secure_world import SecureManager, secure_manager
from varuna_manager.errors import StartError
from varuna_manager.server.process import run
from varuna_manager.settings import ManagerSettings
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("azure")

SETTINGS = {
    "subscription_id": "00000000-0000-0000-0000-000000000000",
    "resource_group": "training",
    "location": "westeurope",
    "sizes": [{"name": "Standard_F2s_v2", "gpus": 1, "price_per_hour": 0.02}],
    "image": "Canonical:ubuntu-24_04-lts:server:latest",
    "subnet_id": "/subnets/vms",
    "ssh_public_key": "ssh-ed25519 AAAA",
    "device": "cpu",
    "list_every_s": 0.2,
    "retail_prices_url": "",
    "pip_options": "--no-index --no-deps",  # here nothing is fetched from elsewhere
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, as `make wheel` makes it."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=DEADLINE_S)
    shutil.copy(ROOT / "constraints.txt", folder)
    return folder


@pytest.fixture(scope="module")
def arm() -> Iterator[FakeArm]:
    with fake_arm() as served:
        yield served


@pytest.fixture(scope="module")
def manager(arm: FakeArm, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureManager]:
    """One for all tests: each gives back the VMs that it has asked for."""
    tmp_path = tmp_path_factory.mktemp("azure")
    settings = tmp_path / "azure.yaml"
    settings.write_text(yaml.safe_dump(SETTINGS))
    program = (str(WORKERS / "manager_on_fake_azure.py"), arm.url)
    flags = ("--provider", f"azure:{settings}", "--agent-wheel", str(wheels), "--max-cost-per-hour", "0.05")
    with secure_manager(tmp_path / "data", *flags, program=program) as running:
        yield running


class VmFolder:
    """A VM's file system, as far as its cloud-init document goes."""

    def __init__(self, folder: Path, custom_data: str) -> None:
        self.folder = folder
        self._document = yaml.safe_load(base64.b64decode(custom_data))
        for file in self._document["write_files"]:
            path = self._inside(file["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._relocated(file["content"]))
            path.chmod(int(file["permissions"], 8))
        self.calls = folder / "calls"
        stubs = folder / "stubs"
        stubs.mkdir()
        for program in ("systemctl", "useradd"):  # this machine must stay as it is
            (stubs / program).write_text(f'#!/bin/sh\necho {program} "$@" >> {self.calls}\n')
            (stubs / program).chmod(0o755)

    def _inside(self, path: str) -> Path:
        return self.folder / path.removeprefix("/")

    def _relocated(self, text: str) -> str:
        for place in ("/etc/varuna", "/opt/varuna", "/var/lib/"):
            text = text.replace(place, f"{self.folder}{place}")
        return text

    def run_commands(self) -> None:
        for command in self._document["runcmd"]:
            environment = {**os.environ, "PATH": f"{self.folder / 'stubs'}:{os.environ['PATH']}"}
            done = subprocess.run(
                [str(self._inside(command[0]))],
                env=environment,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr

    def start_agent(self) -> subprocess.Popen[bytes]:
        """By the flags of its unit. Nobody is root here, so its jobs run as it does."""
        environment = self._inside("/etc/varuna/agent.env").read_text()
        flags = [flag for flag in environment.strip().partition("=")[2].split() if not flag.startswith("--run-as")]
        with (self.folder / "agent.log").open("wb") as log:
            command = [sys.executable, "-m", "varuna_agent.main", "--vm-dir", str(self.folder / "state"), *flags]
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def vms(admin: httpx.Client) -> dict[str, dict[str, Any]]:
    return {vm["id"]: vm for vm in admin.get("/vms").json()}


@pytest.mark.slow
def test_a_vm_installs_its_agent_from_the_manager_joins_and_is_evicted(
    arm: FakeArm, manager: SecureManager, wheels: Path, tmp_path: Path
) -> None:
    admin = manager.admin()
    assert admin.put("/fleet", json={"target": 3}).status_code == 200
    # Three are wanted, at 0.02 an hour, and 0.05 is the limit.
    wait_until(lambda: len(arm.vms.keys() & vms(admin).keys()) == 2, "two VMs")
    first, _ = sorted(arm.vms)
    folder = VmFolder(tmp_path / "vm", arm.vms[first].body["properties"]["osProfile"]["customData"])

    folder.run_commands()
    assert (folder.folder / "opt/varuna/bin/varuna").exists()
    installed = list(folder.folder.glob("opt/varuna/lib/python3*/site-packages/varuna_agent/main.py"))
    assert installed[0].read_bytes() == (ROOT / "agent/varuna_agent/main.py").read_bytes()
    calls = folder.calls.read_text()
    assert "useradd --system --create-home" in calls
    assert "systemctl enable --now varuna-agent.service" in calls

    agent = folder.start_agent()
    try:
        wait_until(lambda: vms(admin)[first]["state"] == "ready", "the agent")
        assert vms(admin)[first]["host"] == "127.0.0.1"
        assert admin.put("/providers/local", json={"capacity": 3}).status_code == 409
        assert admin.post(f"/vms/{first}/preempt", json={"notice_s": 30}).status_code == 409
        assert admin.put("/fleet", json={"target": 1}).status_code == 200
        wait_until(lambda: len(arm.vms) == 1, "one VM is too many")
        assert admin.put("/fleet", json={"target": 0}).status_code == 200
        assert agent.wait(DEADLINE_S) == 0, (folder.folder / "agent.log").read_text()
        wait_until(lambda: not arm.vms, "none is left at Azure")
    finally:
        agent.kill()
        agent.wait()


def test_an_evicted_vm_is_replaced(arm: FakeArm, manager: SecureManager) -> None:
    admin = manager.admin()
    admin.put("/fleet", json={"target": 1})
    wait_until(lambda: arm.vms.keys() & vms(admin).keys(), "a VM")
    (first,) = arm.vms
    assert admin.post(f"/vms/{first}/preempt", json={}).status_code == 200
    wait_until(lambda: vms(admin)[first]["state"] == "gone", "the eviction")
    wait_until(lambda: arm.vms.keys() & vms(admin).keys(), "another VM")
    assert first not in arm.vms
    admin.put("/fleet", json={"target": 0})
    wait_until(lambda: not arm.vms, "none is left at Azure")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "cannot reach a manager on a loopback address"),
        ({"secure": True}, "--agent-wheel: this manager has no wheel for agents"),
        ({"secure": True, "agent_wheel": "/nowhere"}, r"there is no varuna_spot-\*\.whl in /nowhere"),
    ],
)
async def test_a_manager_whose_vms_could_never_join_does_not_start(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    settings = tmp_path / "azure.yaml"
    settings.write_text(yaml.safe_dump(SETTINGS))
    provider = f"azure:{settings}"
    with pytest.raises(StartError, match=message):
        await run(ManagerSettings(data_dir=tmp_path, http_port=0, grpc_port=0, provider=provider, **given))
