"""The Kubernetes provider over the tests' own API server, through the real client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User

from fake_cluster import PODS, SECRETS, ApiError, FakeCluster
from fake_kubernetes import ADMIN_TOKEN, FakeKubernetes, serve_kubernetes
from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.providers.conformance import ProviderBench
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.kubernetes import api as api_module
from varuna_manager.providers.kubernetes.api import KubernetesApi
from varuna_manager.providers.kubernetes.provider import KubernetesProvider
from varuna_manager.providers.kubernetes.settings import KubernetesPool, KubernetesSettings
from waiting import DEADLINE_S, until

NAMESPACE = "training"
TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "agent", "image": "registry.test/varuna-agent:1"}]}}
SETTINGS = KubernetesSettings(
    namespace=NAMESPACE,
    template=TEMPLATE,
    pools=(KubernetesPool(name="spot", gpus=1), KubernetesPool(name="other", gpus=2)),
)
ORIGIN = Origin(managers="varuna-manager:8751", urls=("https://varuna-manager:8750",), ca_pem="the authority")
_PAUSES_S = 3600.0
"""Longer than any pause after a refusal."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_config(url: str, token: str = ADMIN_TOKEN) -> SingleConfig:
    return SingleConfig(
        context_name="test", context=Context(cluster="test", user="test"), cluster=Cluster(server=url, insecure=True),
        user=User(token=token),
    )  # fmt: skip


def make_api(url: str, namespace: str | None, token: str = ADMIN_TOKEN) -> KubernetesApi:
    """A client that waits for each answer as long as any test may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_module, "_TIMEOUT_S", DEADLINE_S)
        return KubernetesApi(make_config(url, token), namespace)


class KubernetesBench(ProviderBench):
    refusals = frozenset({RefusalKind.QUOTA, RefusalKind.THROTTLED, RefusalKind.FAILED})
    gives_notices = True

    def __init__(
        self,
        server: FakeKubernetes,
        settings: KubernetesSettings = SETTINGS,
        *,
        token: str = ADMIN_TOKEN,
        **options: Any,
    ) -> None:
        self.server = server
        self.cluster: FakeCluster = server.cluster
        self.settings = settings
        self.clock = Clock()
        self._token, self._options = token, options
        self.tokens: list[str] = []
        """Pods for which a join token was made."""
        self.providers: list[KubernetesProvider] = []
        self.provider: KubernetesProvider = self._make()

    def _make(self) -> KubernetesProvider:
        api = make_api(self.server.url, self.settings.namespace, self._token)
        options = {"now": self.clock, **self._options}
        made = KubernetesProvider(self.settings, api, ORIGIN, self._make_join_token, **options)
        self.providers.append(made)
        return made

    async def _make_join_token(self, vm_id: str) -> str:
        self.tokens.append(vm_id)
        return f"token-of-{vm_id}"

    async def catch_up(self) -> None:
        """Wait until the provider's watch has brought all that has happened."""
        cache = self.provider._cache

        def is_there() -> bool:
            real = {pod["metadata"]["name"]: pod["metadata"]["resourceVersion"] for pod in self._list_pods()}
            known = {name: pod["metadata"]["resourceVersion"] for name, pod in cache.pods.items()}
            return not cache.is_watching or real == known

        await until(is_there, "the watch brings all changes")

    async def keep_house(self) -> None:
        """Let the provider go through what it does beside the manager's calls, until all that has an effect."""
        for _ in range(2):  # a round that was under way may not have seen the latest
            await self.catch_up()
            await self.provider.list()
            task = self.provider._housekeeping
            assert task is not None
            await task
        await self.catch_up()

    def _list_pods(self) -> list[Any]:
        pods = self.cluster.list_objects(PODS, self.settings.namespace)
        return [pod for pod in pods if pod["metadata"].get("labels", {}).get("varuna/fleet") == self.settings.fleet]

    async def restart_provider(self) -> None:
        self.provider = self._make()

    async def list_real_vms(self) -> Collection[str]:
        return {pod["metadata"]["name"] for pod in self._list_pods()}

    async def list_leftovers(self) -> Sequence[str]:
        return [secret["metadata"]["name"] for secret in self.cluster.list_objects(SECRETS)]

    async def advance(self) -> None:
        self.cluster.confirm_deletions()
        await self.catch_up()

    async def lose_next_answer(self) -> None:
        """The API server dies in the middle, with the watch."""
        self.cluster.lost_answers = 1

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        if kind is RefusalKind.QUOTA:
            self.cluster.pod_quota = len(self.cluster.list_objects(PODS, self.settings.namespace)) + granted
        elif kind is RefusalKind.THROTTLED:
            text = "too many requests, please try again later"
            self.cluster.creations_fail_with = ApiError(429, "TooManyRequests", text, _PAUSES_S)
        else:
            text = "admission webhook denied the request: no image of registry.test is signed"
            self.cluster.creations_fail_with = ApiError(400, "BadRequest", text)

    async def end_refusals(self) -> None:
        self.cluster.pod_quota = self.cluster.creations_fail_with = None
        self.clock.now += _PAUSES_S

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        """As an eviction with this grace period."""
        if notice_s:
            self.cluster.evict_pod(vm_id, NAMESPACE, int(notice_s))
        else:
            self.cluster.remove_pod(vm_id, NAMESPACE)
        await self.catch_up()

    async def cut_off(self) -> None:
        self.cluster.cut_off(is_away=True)
        await until(lambda: not self.provider._cache.is_watching, "the watch breaks")

    async def reconnect(self) -> None:
        self.cluster.cut_off(is_away=False)

    async def add_stranger(self) -> str | None:
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"}, **TEMPLATE}
        self.cluster.create(PODS, NAMESPACE, body)
        return "stranger"


@asynccontextmanager
async def open_kubernetes_bench(
    settings: KubernetesSettings = SETTINGS, cluster: FakeCluster | None = None, **options: Any
) -> AsyncIterator[KubernetesBench]:
    server = FakeKubernetes(cluster or FakeCluster())
    async with serve_kubernetes(server):
        bench = KubernetesBench(server, settings, **options)
        try:
            yield bench
        finally:
            for provider in bench.providers:
                await provider.close(end_vms=False)
