"""The whole life of pods under a real manager with the rights of our manifests: requested, joined, drained, killed.

The cluster is the tests' own API server. Its kubelet is `PodProcess`, which runs the agent as the pod says.
"""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fake_cluster import PODS, SECRETS, FakeCluster, Object
from fake_kubernetes import FakeKubernetes, fake_kubernetes
from manager_rights import read_rights
from secure_world import SecureManager, secure_manager
from varuna_manager.errors import StartError
from varuna_manager.server.process import run
from varuna_manager.settings import ManagerSettings
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("kubernetes")
SETTINGS: Object = {
    "namespace": "training",
    "device": "cpu",
    "template": {
        "spec": {"containers": [{"name": "agent", "image": "varuna-agent", "args": ["--memory-part=0"]}]},
    },
    "pools": [{"name": "spot", "gpus": 1}],
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeKubernetes]:
    with fake_kubernetes(FakeKubernetes(FakeCluster(), roles={"the manager's": read_rights("training")})) as served:
        yield served
        assert served.cluster.forbidden == [], "the rights of deploy/kubernetes/rbac.yaml are enough"


@pytest.fixture(scope="module")
def manager(server: FakeKubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureManager]:
    folder = tmp_path_factory.mktemp("kubernetes")
    server.write_kubeconfig(folder / "kubeconfig", "the manager's")
    settings = folder / "provider.yaml"
    settings.write_text(yaml.safe_dump({**SETTINGS, "kubeconfig": str(folder / "kubeconfig")}))
    with secure_manager(folder / "data", "--provider", f"kubernetes:{settings}") as running:
        yield running


class PodProcess:
    """The agent's container of a pod, with the pod's folders below a folder of the test."""

    def __init__(self, cluster: FakeCluster, pod: Object, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.name = pod["metadata"]["name"]
        (self._container,) = pod["spec"]["containers"]
        (volume,) = pod["spec"]["volumes"]
        (mount,) = self._container["volumeMounts"]
        assert volume["name"] == mount["name"]
        secret = cluster.get(SECRETS, "training", volume["secret"]["secretName"])
        for key, value in secret["data"].items():
            place = self._inside(f"{mount['mountPath']}/{key}")
            place.parent.mkdir(parents=True)
            place.write_bytes(base64.b64decode(value))
        self._inside("/data").mkdir()
        with (folder / "agent.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "varuna_agent.main", *map(self._relocate, self._container["args"])],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _inside(self, path: str) -> Path:
        return self._folder / path.removeprefix("/")

    def _relocate(self, argument: str) -> str:
        return argument.replace("=/run/", f"={self._folder}/run/").replace("=/data", f"={self._folder}/data")

    def stop(self) -> None:
        """As a kubelet does: the hook before the stop, and no more if the container has ended by then."""
        program, *arguments = self._container["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "python3"
        moved = [each.replace("/data", f"{self._folder}/data") for each in arguments]
        with subprocess.Popen([sys.executable, *moved]) as hook:
            code = self.process.wait(DEADLINE_S)
            hook.kill()
        self._cluster.end_pod(self.name, code=code)
        self._cluster.remove_pod(self.name)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def vms(admin: httpx.Client) -> dict[str, dict[str, Any]]:
    return {vm["id"]: vm for vm in admin.get("/vms", params={"gone": True}).json()}


def wait_for_pods(server: FakeKubernetes, count: int) -> list[Object]:
    """Pods whose container runs, as far as the API server knows."""

    def running() -> list[Object]:
        return [pod for pod in server.cluster.list_objects(PODS) if pod["status"]["phase"] == "Running"]

    return list(wait_until(lambda: (found := running()) and len(found) == count and found, f"{count} pods"))


def test_pods_join_as_vms_leave_after_a_drain_of_their_node_and_are_replaced(
    server: FakeKubernetes, manager: SecureManager, tmp_path: Path
) -> None:
    admin, cluster = manager.admin(), server.cluster
    cluster.schedules = False
    assert admin.put("/fleet", json={"target": 1}).status_code == 200
    (name,) = wait_until(lambda: vms(admin), "the VM of a pod")
    cluster.refuse_to_schedule(name, "0/3 nodes are available.")
    wait_until(lambda: vms(admin)[name]["reason"] == "its pod waits: 0/3 nodes are available.", "what it waits for")
    cluster.schedules = True
    cluster.bind_pod(name)
    (pod,) = wait_for_pods(server, 1)
    agent = PodProcess(cluster, pod, tmp_path / "first")
    try:
        wait_until(lambda: vms(admin)[agent.name]["state"] == "ready", "the agent")
        cluster.evict_pod(agent.name)
        wait_until(lambda: vms(admin)[agent.name]["state"] == "draining", "the notice")
        agent.stop()
        wait_until(lambda: vms(admin)[agent.name]["state"] == "gone", "the end")
        assert "it left: it has notice to leave" in vms(admin)[agent.name]["reason"]
        assert agent.process.returncode == 0, (tmp_path / "first" / "agent.log").read_text()
        (other,) = wait_for_pods(server, 1)
        name = other["metadata"]["name"]
        assert name != agent.name
        cluster.end_pod(name, code=137, why="OOMKilled")
        wait_until(lambda: vms(admin)[name]["state"] == "gone", "the end of the other")
        assert vms(admin)[name]["reason"].startswith("its container ran out of memory (OOMKilled")
        assert admin.put("/fleet", json={"target": 0}).status_code == 200
    finally:
        agent.end()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "cannot reach a manager on a loopback address"),
        ({"secure": True}, r"no access to Kubernetes \(Configuration file .*/nowhere not found\)"),
    ],
)
async def test_a_manager_whose_pods_could_never_join_does_not_start(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    settings = tmp_path / "provider.yaml"
    settings.write_text(yaml.safe_dump({**SETTINGS, "kubeconfig": str(tmp_path / "nowhere")}))
    provider = f"kubernetes:{settings}"
    with pytest.raises(StartError, match=message):
        await run(ManagerSettings(data_dir=tmp_path, http_port=0, grpc_port=0, provider=provider, **given))
