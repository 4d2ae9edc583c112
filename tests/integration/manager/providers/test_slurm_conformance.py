"""The Slurm provider passes the suite that every provider must pass, on a real Slurm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slurm_bench import SlurmBench
from slurm_cluster import SlurmCluster, slurm_cluster
from varuna_manager.providers.conformance import KindConformance, ProviderConformance

CLUSTER: list[SlurmCluster] = []
"""The one that runs now: the suite's tests take no fixtures."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with slurm_cluster() as running:
        CLUSTER.append(running)
        yield
        CLUSTER.remove(running)


@pytest.mark.slow
@pytest.mark.needs("slurm")
@pytest.mark.xdist_group("slurm-conformance")
@pytest.mark.usefixtures("cluster")
class TestSlurm(ProviderConformance):
    @asynccontextmanager
    async def open_bench(self, folder: Path) -> AsyncIterator[SlurmBench]:
        bench = SlurmBench(CLUSTER[0], folder)
        try:
            yield bench
        finally:
            await bench.end_refusals()


class TestSlurmKind(KindConformance):
    name = "slurm"
