"""Our providers pass the suite that every provider must pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from provider_benches import (
    AzureBench,
    LocalBench,
    ReplayBench,
    StaticBench,
    open_azure_bench,
    open_local_bench,
)
from varuna_manager.providers.conformance import (
    FixedProviderConformance,
    KindConformance,
    ProviderBench,
    ProviderConformance,
)


class TestLocal(ProviderConformance):
    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[ProviderBench]:
        return open_local_bench(LocalBench(folder))


class TestReplay(ProviderConformance):
    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[ProviderBench]:
        return open_local_bench(ReplayBench(folder))


class TestStatic(FixedProviderConformance):
    @asynccontextmanager
    async def open_bench(self, folder: Path) -> AsyncIterator[StaticBench]:
        yield StaticBench()


class TestAzure(ProviderConformance):
    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[AzureBench]:
        return open_azure_bench()


class TestStaticKind(KindConformance):
    name = "static"


class TestAzureKind(KindConformance):
    name = "azure"
