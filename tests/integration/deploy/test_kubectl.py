"""kubectl and the provider, side by side on the tests' own API server: what docs/kubernetes.md shows."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fake_cluster import DEPLOYMENTS, KINDS, PODS, FakeCluster
from fake_kubernetes import FakeKubernetes, serve_kubernetes
from kubernetes_bench import SETTINGS, KubernetesBench
from manager_rights import read_rights
from repository import ROOT
from waiting import until

pytestmark = [pytest.mark.needs("kubectl"), pytest.mark.xdist_group("kubectl")]
NAMESPACE = "varuna"


class Kubectl:
    """The command, as the admin of the cluster."""

    def __init__(self, server: FakeKubernetes, folder: Path) -> None:
        self._kubeconfig, self._folder = folder / "kubeconfig", folder
        server.write_kubeconfig(self._kubeconfig, namespace=NAMESPACE)

    async def run(self, *arguments: str) -> str:
        options = ("--kubeconfig", str(self._kubeconfig), "--cache-dir", str(self._folder / "cache"))
        environment = {**os.environ, "HOME": str(self._folder)}
        process = await asyncio.create_subprocess_exec(
            "kubectl", *options, *arguments, cwd=ROOT, env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, f"kubectl {' '.join(arguments)}: {err.decode()}"
        return out.decode()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[FakeKubernetes, Kubectl]]:
    server = FakeKubernetes(FakeCluster(), roles={"the manager's": read_rights(NAMESPACE)})
    async with serve_kubernetes(server, tls=True):
        yield server, Kubectl(server, tmp_path)


async def test_the_deployment_is_applied_as_a_whole_and_owns_the_pods(
    cluster: tuple[FakeKubernetes, Kubectl],
) -> None:
    server, kubectl = cluster
    # Discovery alone: the tests' API server serves no schemas to kubectl, and checks objects by the same ones itself.
    await kubectl.run("apply", "--validate=false", "-k", "deploy/kubernetes")
    deployment = server.cluster.get(DEPLOYMENTS, NAMESPACE, "varuna-manager")
    spec = deployment["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "registry.example.com/varuna-manager:0.1.0"
    configured = {each["metadata"]["name"]: each for each in server.cluster.list_objects(KINDS[3], NAMESPACE)}
    used = [volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume]
    used += [each["configMapRef"]["name"] for each in spec["containers"][0]["envFrom"]]
    assert {*used} == configured.keys()
    assert any("owner_deployment" in text for each in configured.values() for text in each["data"].values())
    shown = await kubectl.run("get", "deploy,svc,pdb,networkpolicy", "-o", "name")
    assert "poddisruptionbudget.policy/varuna-manager" in shown
    async with AsyncExitStack() as stack:
        settings = SETTINGS.model_copy(update={"namespace": NAMESPACE, "owner_deployment": "varuna-manager"})
        bench = KubernetesBench(server, settings, token="the manager's")
        stack.push_async_callback(bench.provider.close, end_vms=False)
        (vm,) = (await bench.provider.create(1, "1")).vms
        assert (await kubectl.run("get", "pods", "-l", "varuna/fleet=varuna", "-o", "name")).strip() == f"pod/{vm.id}"
        await kubectl.run("delete", "deployment", "varuna-manager", "--wait=false")
        await until(lambda: server.cluster.get(PODS, NAMESPACE, vm.id)["metadata"].get("deletionTimestamp"), "its end")
    assert server.cluster.forbidden == []


async def test_taints_drains_and_deletions_by_kubectl_are_notices(cluster: tuple[FakeKubernetes, Kubectl]) -> None:
    server, kubectl = cluster
    bench = KubernetesBench(server, SETTINGS.model_copy(update={"namespace": NAMESPACE}), token="the manager's")
    provider = bench.provider
    try:
        names = sorted(vm.id for vm in (await provider.create(3, "1")).vms)
        await bench.keep_house()

        async def wait_for_notices(expected: list[str]) -> None:
            async def are_there() -> bool:
                await provider.list()
                return sorted(notice.vm_id for notice in await provider.list_notices()) == expected

            await until(are_there, f"notices of {expected}")

        await kubectl.run("taint", "node", f"node-of-{names[0]}", "karpenter.sh/disrupted=:NoSchedule")
        await wait_for_notices(names[:1])
        await kubectl.run("delete", "pod", names[1], "--wait=false")
        await wait_for_notices(names[:2])
        drain = asyncio.create_task(kubectl.run("drain", f"node-of-{names[2]}", "--ignore-daemonsets", "--force"))
        await wait_for_notices(names)
        server.cluster.confirm_deletions()
        await drain
        ends = await until(lambda: _find_ends(provider), "their ends")
        assert ends == {
            names[1]: "its pod was deleted, and not by this manager",
            names[2]: "it was evicted through the API, as by kubectl drain: Eviction API: evicting",
        }
        shown = json.loads(await kubectl.run("get", "pod", names[0], "-o", "json"))
        assert shown["metadata"]["labels"]["varuna/request"] == "1"
        assert "varuna-join" in await kubectl.run("describe", "pod", names[0])
    finally:
        await provider.close(end_vms=False)
    assert server.cluster.forbidden == []


async def _find_ends(provider: Any) -> dict[str, str]:
    ended = {vm.id: vm.ended for vm in await provider.list() if vm.ended is not None}
    return ended if len(ended) == 2 else {}
