"""Bodies of requests to the API server: the pod of a new VM, made from the user's template, and its join token.

The token is in a Secret that the pod mounts and owns. So it is on no command line and in no environment, and goes with
the pod.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_manager.providers.boot import AgentMachine, make_agent_flags
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.kubernetes.settings import (
    AGENT_CONTAINER,
    GPU_RESOURCE,
    KubernetesPool,
    KubernetesSettings,
)

__all__ = ["FLEET_LABEL", "POOL_LABEL", "REQUEST_LABEL", "Owner", "make_pod_body", "make_pod_name", "make_secret_body"]

FLEET_LABEL = "varuna/fleet"
REQUEST_LABEL = "varuna/request"
POOL_LABEL = "varuna/pool"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_TOKEN_VOLUME = "varuna-join"
_TOKEN_FOLDER = "/run/varuna/join"
_GRACE_S = 60
_STOP_S = 8
"""How long an agent takes to end after SIGTERM, at most."""
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The object with which Kubernetes deletes the pods."""

    api_version: str
    kind: str
    name: str
    uid: str


def make_pod_name(fleet: str, request: str, index: int) -> str:
    """A name, at most 63 characters long, that no other request has: so no request makes a pod twice."""
    tag = re.sub(r"[^a-z0-9]+", "-", request.lower()).strip("-")
    if tag != request or len(tag) > 32:
        tag = f"{tag[:20].strip('-')}-{hashlib.sha256(request.encode()).hexdigest()[:10]}".lstrip("-")
    return f"{fleet}-{tag}-{index:03d}"


def make_pod_body(
    settings: KubernetesSettings, pool: KubernetesPool, name: str, request: str, origin: Origin, owner: Owner | None
) -> dict[str, Any]:
    """A bare pod: the template, with the fleet's labels, the agent's arguments, its join token and its GPUs."""
    template = copy.deepcopy(dict(settings.find_template(pool)))
    metadata, spec = dict(template.get("metadata") or {}), template["spec"]
    labels = {
        "app.kubernetes.io/name": "varuna-agent",
        **(metadata.get("labels") or {}),
        **({} if settings.queue_name is None else {_QUEUE_LABEL: settings.queue_name}),
        FLEET_LABEL: settings.fleet,
        REQUEST_LABEL: request,
        POOL_LABEL: pool.name,
    }
    metadata.update(name=name, labels=labels)
    if owner is not None:
        metadata["ownerReferences"] = [_make_reference(owner)]
    spec["restartPolicy"] = "Never"
    spec.setdefault("terminationGracePeriodSeconds", _GRACE_S)
    spec.setdefault("automountServiceAccountToken", False)  # jobs have no business at the API server
    if pool.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **pool.node_selector}
    if pool.tolerations:
        spec["tolerations"] = [*(spec.get("tolerations") or ()), *pool.tolerations]
    token = {"name": _TOKEN_VOLUME, "secret": {"secretName": name, "defaultMode": 0o444}}
    spec["volumes"] = [*(spec.get("volumes") or ()), token]
    agent = next(each for each in spec["containers"] if each.get("name") == AGENT_CONTAINER)
    _fill_agent(agent, settings, pool, name, origin)
    stop = _make_stop_command(settings.vm_dir, spec["terminationGracePeriodSeconds"])
    agent.setdefault("lifecycle", {"preStop": {"exec": {"command": stop}}})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _fill_agent(
    agent: dict[str, Any], settings: KubernetesSettings, pool: KubernetesPool, name: str, origin: Origin
) -> None:
    """Arguments of the template come last, so they win."""
    machine = AgentMachine(
        vm_id=name,
        gpus=pool.gpus,
        device=settings.device,
        notices="file",
        device_memory_bytes=None if pool.device_memory_gib is None else int(pool.device_memory_gib * _GIB),
    )
    flags = {
        "vm-dir": settings.vm_dir,
        **make_agent_flags(origin, machine, join_token_file=f"{_TOKEN_FOLDER}/token"),
    }
    if pool.gpu_type and settings.device == "cpu":
        flags["gpu-type"] = pool.gpu_type
    agent["args"] = [*(f"--{flag}={value}" for flag, value in flags.items()), *(agent.get("args") or ())]
    mount = {"name": _TOKEN_VOLUME, "mountPath": _TOKEN_FOLDER, "readOnly": True}
    agent["volumeMounts"] = [*(agent.get("volumeMounts") or ()), mount]
    if settings.device == "cuda":
        resources = agent.setdefault("resources", {})
        resources["limits"] = {**(resources.get("limits") or {}), GPU_RESOURCE: pool.gpus}


def _make_stop_command(vm_dir: str, grace_s: float) -> Sequence[str]:
    """Kubernetes runs it in the container before SIGTERM: the agent gets a notice, and has most of the grace period to
    leave."""
    return ["python3", "-m", "varuna_agent.notices.pre_stop", vm_dir, f"{max(grace_s - _STOP_S, 1):g}"]


def make_secret_body(pod: Mapping[str, Any], join_token: str) -> dict[str, Any]:
    """The Secret with the pod's join token. It has the pod's name, and Kubernetes deletes it with the pod."""
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    labels = {key: value for key, value in pod["metadata"].get("labels", {}).items() if key.startswith("varuna/")}
    owner = Owner(api_version="v1", kind="Pod", name=name, uid=uid)
    metadata = {"name": name, "labels": labels, "ownerReferences": [_make_reference(owner)]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": {"token": f"{join_token}\n"},
    }


def _make_reference(owner: Owner) -> dict[str, Any]:
    """Not a controller's: a Deployment does not manage these pods, it only takes them along."""
    return {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }
