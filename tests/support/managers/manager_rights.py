"""What the manager may do in a cluster, as deploy/kubernetes/rbac.yaml gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fake_cluster_validation import read_manifests
from repository import ROOT


def read_rights(namespace: str) -> Sequence[dict[str, Any]]:
    """The rules of its roles: those of Roles count in `namespace`, those of ClusterRoles everywhere."""
    manifests = read_manifests((ROOT / "deploy" / "kubernetes" / "rbac.yaml").read_text())
    rights = []
    for manifest in manifests:
        if manifest["kind"] in ("Role", "ClusterRole"):
            place = {"namespace": namespace} if manifest["kind"] == "Role" else {}
            rights += [{**rule, **place} for rule in manifest["rules"]]
    return rights
