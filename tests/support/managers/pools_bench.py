"""Two pools, of Azure and of AWS, each over the fake of its service, as one provider."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from ec2_bench import Ec2Bench, open_ec2_bench
from provider_benches import AzureBench, open_azure_bench
from varuna_manager.domain.pools import PoolTerms
from varuna_manager.providers.base import Provider, RefusalKind
from varuna_manager.providers.conformance import ProviderBench
from varuna_manager.providers.pools.provider import Pool, PoolsProvider

AZURE = PoolTerms(name="azure-1", price_per_hour=1.0, zone="westeurope", gpu_type="V100")
AWS = PoolTerms(name="aws-1", price_per_hour=2.0, zone="eu-west-1", gpu_type="V100", machine_type="p3.2xlarge")


class PoolsBench(ProviderBench):
    """The first pool has what `granted` allows, and the second has nothing more: so a request needs both to refuse."""

    refusals = frozenset({RefusalKind.CAPACITY, RefusalKind.QUOTA, RefusalKind.THROTTLED})

    def __init__(self, azure: AzureBench, aws: Ec2Bench) -> None:
        self.azure, self.aws = azure, aws
        self.provider: Provider = self._make()

    def _make(self) -> PoolsProvider:
        return PoolsProvider([Pool(AZURE, self.azure.provider), Pool(AWS, self.aws.provider)])

    async def restart_provider(self) -> None:
        await self.azure.restart_provider()
        await self.aws.restart_provider()
        self.provider = self._make()

    async def list_real_vms(self) -> Collection[str]:
        return {*await self.azure.list_real_vms(), *await self.aws.list_real_vms()}

    async def advance(self) -> None:
        await self.azure.advance()
        await self.aws.advance()

    async def lose_next_answer(self) -> None:
        await self.azure.lose_next_answer()
        await self.aws.lose_next_answer()

    async def refuse_creations(self, kind: RefusalKind, granted: int) -> None:
        await self.azure.refuse_creations(kind, granted)
        await self.aws.refuse_creations(kind, 0)

    async def end_refusals(self) -> None:
        await self.azure.end_refusals()
        await self.aws.end_refusals()

    async def take_vm(self, vm_id: str, notice_s: float) -> None:
        owner = self.azure if vm_id in await self.azure.list_real_vms() else self.aws
        await owner.take_vm(vm_id, notice_s)

    async def cut_off(self) -> None:
        await self.azure.cut_off()
        await self.aws.cut_off()

    async def reconnect(self) -> None:
        await self.azure.reconnect()
        await self.aws.reconnect()

    async def add_stranger(self) -> str | None:
        return await self.azure.add_stranger()

    async def list_leftovers(self) -> Sequence[str]:
        return [*await self.azure.list_leftovers(), *await self.aws.list_leftovers()]


@asynccontextmanager
async def open_pools_bench(fleet: str) -> AsyncIterator[PoolsBench]:
    async with open_azure_bench() as azure, open_ec2_bench(fleet=fleet) as aws:
        yield PoolsBench(azure, aws)
