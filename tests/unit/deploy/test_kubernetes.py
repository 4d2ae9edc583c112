"""deploy/kubernetes: valid by Kubernetes' own schemas, without privileges, and true to the manager's options."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from fake_cluster_validation import VERSION, find_warnings, read_manifests, validate_object
from repository import ROOT
from varuna_manager.access.authority import open_authority
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.kubernetes.pod_body import make_pod_body
from varuna_manager.providers.kubernetes.settings import read_kubernetes_settings
from varuna_manager.settings import ManagerSettings

FOLDER = ROOT / "deploy" / "kubernetes"
POOLS = sorted((FOLDER / "pools").glob("*.yaml"))
(KUSTOMIZATION,) = read_manifests((FOLDER / "kustomization.yaml").read_text())
MANIFESTS = [each for name in KUSTOMIZATION["resources"] for each in read_manifests((FOLDER / name).read_text())]
ORIGIN = Origin(managers="varuna-manager:8751", urls=("https://varuna-manager:8750",), ca_pem=None)
OLDEST = "1.31"


def find(kind: str, name: str = "varuna-manager") -> dict[str, Any]:
    (found,) = [each for each in MANIFESTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def make_pods(path: Path) -> Iterator[dict[str, Any]]:
    """A pod of each pool of a settings file."""
    settings = read_kubernetes_settings(path)
    for pool in settings.pools:
        yield make_pod_body(settings, pool, "varuna-1-000", "1", ORIGIN, None)


def find_privileges(spec: dict[str, Any]) -> list[str]:
    """What the profile "restricted" of the Pod Security Standards does not allow."""
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    of_pod = spec.get("securityContext", {})
    if of_pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("no seccomp profile")
    allowed = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    found += [f"volume {each['name']}" for each in spec.get("volumes", []) if not (each.keys() - {"name"}) <= allowed]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            found.append(f"{container['name']} may gain privileges")
        if context.get("capabilities", {}).get("drop") != ["ALL"] or context["capabilities"].get("add"):
            found.append(f"{container['name']} has capabilities")
        if not context.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
            found.append(f"{container['name']} may run as root")
    return found


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_every_manifest_is_valid(manifest: dict[str, Any]) -> None:
    assert find_warnings(manifest) == []
    assert validate_object(manifest) is None
    kubernetes_validate.validate(manifest, OLDEST, strict=True)


def test_the_kustomization_has_every_manifest() -> None:
    names = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert {*KUSTOMIZATION["resources"]} == names
    for generator in KUSTOMIZATION["configMapGenerator"]:
        for file in generator.get("files", []):
            assert (FOLDER / file.partition("=")[2]).exists()


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_the_pods_of_every_example_are_valid_and_have_no_privileges(path: Path) -> None:
    pods = list(make_pods(path))
    assert pods
    for pod in pods:
        assert find_warnings(pod) == []
        assert validate_object(pod) is None, VERSION
        assert find_privileges(pod["spec"]) == []
        kubernetes_validate.validate(pod, OLDEST, strict=True)


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_the_examples_are_for_the_manager_of_these_manifests(path: Path) -> None:
    settings = read_kubernetes_settings(path)
    assert settings.owner_deployment == find("Deployment")["metadata"]["name"]
    assert settings.labels_leader


def test_the_manager_has_no_privileges_and_a_file_system_that_it_cannot_change() -> None:
    spec = find("Deployment")["spec"]["template"]["spec"]
    assert find_privileges(spec) == []
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_privileges_are_found() -> None:
    spec = {
        "hostNetwork": True,
        "volumes": [{"name": "disk", "hostPath": {"path": "/"}}],
        "containers": [{"name": "x", "securityContext": {"privileged": True}}],
    }
    assert find_privileges(spec) == [
        "hostNetwork is set", "no seccomp profile", "volume disk", "x may gain privileges", "x has capabilities",
        "x may run as root",
    ]  # fmt: skip


def test_the_managers_options_and_variables_exist() -> None:
    (container,) = find("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "manager"
    options = [argument.partition("=")[0].removeprefix("--") for argument in container["args"][1:]]
    literals = KUSTOMIZATION["configMapGenerator"][0]["literals"]
    variables = [each["name"] for each in container["env"]] + [each.partition("=")[0] for each in literals]
    options += [each.removeprefix("VARUNA_MANAGER_").lower() for each in variables if each.startswith("VARUNA_")]
    assert {option.replace("-", "_") for option in options} <= ManagerSettings.model_fields.keys()
    assert len(options) == 9


def test_services_policies_and_budgets_select_the_pods_that_they_are_for() -> None:
    labels = find("Deployment")["spec"]["template"]["metadata"]["labels"]
    service = find("Service")["spec"]
    assert {**labels, "varuna/leads": "true"} == service["selector"]
    ports = {port["name"] for port in find("Deployment")["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == ports
    assert find("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert find("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    for path in POOLS:
        for pod in make_pods(path):
            policy = find("NetworkPolicy", "varuna-agent")["spec"]
            assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_the_manager_has_no_right_that_it_does_not_need() -> None:
    """tests/integration/manager/providers/test_kubernetes.py shows that these are enough."""
    rules = find("Role")["rules"]
    assert {(*rule["resources"], *rule["verbs"]) for rule in rules} == {
        ("pods", "create", "delete", "get", "list", "patch", "watch"),
        ("secrets", "create"),
        ("deployments", "get"),
    }
    assert find("ClusterRole", "varuna-manager-nodes")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
    ]


@pytest.mark.processes
def test_an_authority_made_by_the_commands_of_the_documentation_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    commands = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.startswith("    openssl ")]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(shlex.split(command), cwd=tmp_path, check=True, capture_output=True)
    authority = open_authority(tmp_path)
    assert authority.make_server_pair(["varuna-manager"], timedelta(days=1)).key_pem
