"""Settings of the Kubernetes provider: the user's template of a pod, and the pools of nodes in which pods may run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from varuna_manager.providers.settings_file import read_settings_file

__all__ = ["AGENT_CONTAINER", "GPU_RESOURCE", "KubernetesPool", "KubernetesSettings", "read_kubernetes_settings"]

AGENT_CONTAINER = "agent"
GPU_RESOURCE = "nvidia.com/gpu"
_DNS_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"

_NODE_NOTICES: Mapping[str, float] = {
    "cloud.google.com/impending-node-termination": 25.0,  # a taint of GKE: kubelet has 25 of the 30 s of a spot VM
    "PreemptScheduled": 30.0,  # conditions of AKS, from Azure's Scheduled Events
    "TerminateScheduled": 30.0,
    "RedeployScheduled": 30.0,
    "RebootScheduled": 30.0,
    "aws-node-termination-handler/spot-itn": 120.0,  # EC2 announces the end of a spot instance two minutes ahead
    "aws-node-termination-handler/asg-lifecycle-termination": 120.0,
    "aws-node-termination-handler/scheduled-maintenance": 120.0,
    "karpenter.sh/disrupted": 120.0,
    "ToBeDeletedByClusterAutoscaler": 60.0,
    "node.kubernetes.io/out-of-service": 0.0,
}
"""Taints and conditions of nodes that announce their end, and how many seconds a node has from then on."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KubernetesPool(_Model):
    """Nodes of one kind. A fleet may use several, in order of preference."""

    name: str = Field(pattern=_DNS_LABEL, max_length=63)
    gpus: int = Field(default=1, ge=1, description="GPUs of each pod; with device: cpu, workers of each pod")
    device_memory_gib: float | None = Field(default=None, gt=0, description="memory of each GPU")
    gpu_type: str = Field(
        default="", max_length=100, description="name of the GPUs, for jobs with a gpu_type; '': not known"
    )
    price_per_hour: float | None = Field(default=None, ge=0, description="of a pod; null: not known")
    hazard_per_hour: float | None = Field(default=None, ge=0, description="expected preemptions per pod-hour")
    node_selector: dict[str, str] = Field(default_factory=dict, description="added to that of the template")
    tolerations: tuple[dict[str, Any], ...] = Field(default=(), description="added to those of the template")
    template: dict[str, Any] | None = Field(default=None, description="in place of the common template")


class KubernetesSettings(_Model):
    fleet: str = Field(
        default="varuna", pattern=_DNS_LABEL, max_length=20, description="label of the pods, and how their names begin"
    )
    namespace: str | None = Field(
        default=None, pattern=_DNS_LABEL, max_length=63, description="null: the manager's own, or that of the context"
    )
    kubeconfig: Path | None = Field(
        default=None, description="null: the manager's service account, else $KUBECONFIG or ~/.kube/config"
    )
    context: str | None = Field(default=None, description="of the kubeconfig; null: its current one")
    owner_deployment: str | None = Field(
        default=None, description="Deployment that owns the pods, so that they are deleted with it; null: none"
    )
    labels_leader: bool = Field(
        default=False, description="whether the manager that leads labels its own pod with varuna/leads=true"
    )
    queue_name: str | None = Field(default=None, description="LocalQueue of Kueue; null: Kueue is not used")
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="device of the pods' workers")
    vm_dir: str = Field(
        default="/data/vm", pattern="^/", description="the agent's folder in its container; it makes it"
    )
    pending_timeout_s: float = Field(
        default=600.0, gt=0, le=1500, description="a pod without a node for this long is deleted: its pool is refused"
    )
    stuck_timeout_s: float = Field(
        default=120.0, gt=0, le=1500, description="the same for a pod whose image cannot be pulled"
    )
    ended_pods_kept_s: float = Field(
        default=900.0, ge=0, description="how long pods that have ended stay, for kubectl describe and logs"
    )
    node_notices: dict[str, float] = Field(
        default_factory=lambda: dict(_NODE_NOTICES),
        description="taints and conditions of nodes that are notices, with the seconds that a node then has",
    )
    template: dict[str, Any] | None = Field(
        default=None, description="PodTemplateSpec with a container `agent`; each pool may have its own instead"
    )
    pools: tuple[KubernetesPool, ...] = Field(min_length=1, description="in order of preference")

    @field_validator("pools")
    @classmethod
    def _check_names(cls, pools: tuple[KubernetesPool, ...]) -> tuple[KubernetesPool, ...]:
        names = [pool.name for pool in pools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} occurs twice: give each pool a name of its own")
        return pools

    @model_validator(mode="after")
    def _check_templates(self) -> KubernetesSettings:
        for pool in self.pools:
            flaw = _find_flaw(self.find_template(pool), pool, self.device)
            if flaw is not None:
                place = "template" if pool.template is None else f"template of pool {pool.name}"
                raise ValueError(f"{place}: {flaw}")
        return self

    def find_template(self, pool: KubernetesPool) -> Mapping[str, Any]:
        return pool.template if pool.template is not None else self.template or {}


def read_kubernetes_settings(path: Path) -> KubernetesSettings:
    """Raises ValueError with one line that names the file, the field and the value."""
    return read_settings_file(path, KubernetesSettings)


def _find_flaw(template: Mapping[str, Any], pool: KubernetesPool, device: str) -> str | None:
    """What the API server would accept, and this provider cannot use. All else is the API server's to check."""
    if not template:
        return "there is none: give a template with spec.containers, one of them named 'agent'"
    unknown = sorted(template.keys() - {"metadata", "spec"})
    if unknown:
        return f"{unknown[0]!r} is unknown: a template has metadata and spec"
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    if not isinstance(containers, list) or not all(isinstance(each, dict) for each in containers):
        return "spec.containers is no list of containers"
    assert isinstance(spec, dict)
    agent = next((each for each in containers if each.get("name") == AGENT_CONTAINER), None)
    if agent is None:
        return "no container is named 'agent': the agent runs in that one"
    if not agent.get("image"):
        return "the container 'agent' has no image: give one that was built from docker/agent.Dockerfile"
    if spec.get("restartPolicy", "Never") != "Never":
        return f"restartPolicy {spec['restartPolicy']!r}: an agent joins once, so leave it out or give Never"
    return _find_resource_flaw(agent, pool, device)


def _find_resource_flaw(agent: Mapping[str, Any], pool: KubernetesPool, device: str) -> str | None:
    limits = (agent.get("resources") or {}).get("limits") or {}
    given = limits.get(GPU_RESOURCE)
    if device == "cuda" and given is not None and str(given) != str(pool.gpus):
        return f"its limit {GPU_RESOURCE} is {given!r} and pool {pool.name} has gpus: {pool.gpus}: leave the limit out"
    return None
