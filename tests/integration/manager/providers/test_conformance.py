"""Our providers pass the suite that every provider must pass."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from ec2_bench import Ec2Bench, mock_ec2, open_ec2_bench
from gce_bench import FakeGce, GceBench, fake_gce, open_gce_bench
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


@pytest.fixture(scope="module")
def aws() -> Iterator[None]:
    """One for all tests, as AWS is one for all fleets."""
    with mock_ec2():
        yield


@pytest.mark.usefixtures("aws")
class TestEc2(ProviderConformance):
    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[Ec2Bench]:
        return open_ec2_bench(fleet=f"f{uuid.uuid4().hex[:30]}")


@pytest.fixture(scope="class")
def gce(request: pytest.FixtureRequest) -> Iterator[None]:
    with fake_gce() as served:
        request.cls.gce = served
        yield


@pytest.mark.usefixtures("gce")
class TestGce(ProviderConformance):
    gce: ClassVar[FakeGce]

    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[GceBench]:
        return open_gce_bench(self.gce)


class TestStaticKind(KindConformance):
    name = "static"


class TestAzureKind(KindConformance):
    name = "azure"


class TestEc2Kind(KindConformance):
    name = "ec2"


class TestGceKind(KindConformance):
    name = "gce"
