"""The Kubernetes provider passes the suite that every provider must pass."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from kubernetes_bench import KubernetesBench, open_kubernetes_bench
from varuna_manager.providers.conformance import KindConformance, ProviderConformance


class TestKubernetes(ProviderConformance):
    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[KubernetesBench]:
        return open_kubernetes_bench()


class TestKubernetesKind(KindConformance):
    name = "kubernetes"
