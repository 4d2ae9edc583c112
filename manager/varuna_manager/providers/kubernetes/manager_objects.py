"""The manager's own objects in the cluster: its Deployment, which owns the pods, and its pods; one of them leads."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from varuna_manager.providers.kubernetes.api import ApiRefusedError, KubernetesApi
from varuna_manager.providers.kubernetes.pod_body import Owner
from varuna_manager.providers.kubernetes.settings import KubernetesSettings

__all__ = ["LEADER_LABEL", "ManagerObjects", "OwnerError"]

LEADER_LABEL = "varuna/leads"


class OwnerError(Exception):
    """The Deployment of the settings cannot own the pods. `str()` is one line with the way out."""


class ManagerObjects:
    def __init__(self, api: KubernetesApi, settings: KubernetesSettings, *, pod_name: str | None = None) -> None:
        """`pod_name`: the manager's own pod; None: it is the host name, as Kubernetes makes it."""
        self._api = api
        self._settings = settings
        self._pod_name = pod_name or socket.gethostname()
        self._owner: Owner | None = None
        self._is_labelled = not settings.labels_leader

    async def find_owner(self) -> Owner | None:
        """The owner of new pods; None: they have none. Raises OwnerError, ApiRefusedError, ApiAwayError."""
        name = self._settings.owner_deployment
        if name is None or self._owner is not None:
            return self._owner
        try:
            deployment = await self._api.get_deployment(name)
        except ApiRefusedError as error:
            if error.code != 404:
                raise
            place = f"namespace {self._api.namespace} has no Deployment {name!r}"
            raise OwnerError(f"{place}: give owner_deployment the name of the manager's, or leave it out") from error
        selector = (deployment["spec"].get("selector") or {}).get("matchLabels") or {}
        for labels in self._list_template_labels():
            if selector and selector.items() <= labels.items():
                text = f"the template has the labels by which Deployment {name!r} selects its own pods"
                raise OwnerError(f"{text} ({', '.join(selector)}): give the template other labels")
        self._owner = Owner(api_version="apps/v1", kind="Deployment", name=name, uid=deployment["metadata"]["uid"])
        return self._owner

    async def label_leader(self) -> None:
        """Move the leader's label to this manager's pod, once. Raises ApiRefusedError, ApiAwayError."""
        if self._is_labelled:
            return
        pods, _ = await self._api.list_pods({LEADER_LABEL: "true"})
        for pod in pods:
            if pod["metadata"]["name"] != self._pod_name:
                await self._remove_label(pod["metadata"]["name"])
        await self._api.label_pod(self._pod_name, {LEADER_LABEL: "true"})
        self._is_labelled = True

    async def _remove_label(self, name: str) -> None:
        try:
            await self._api.label_pod(name, {LEADER_LABEL: None})
        except ApiRefusedError as error:
            if error.code != 404:
                raise

    def _list_template_labels(self) -> Sequence[dict[str, str]]:
        templates = [self._settings.find_template(pool) for pool in self._settings.pools]
        return [(template.get("metadata") or {}).get("labels") or {} for template in templates]
