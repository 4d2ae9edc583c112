"""Several providers as one: over Azure's and AWS's fakes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from cloud_world import SETTINGS, boot_script, held_answer
from ec2_bench import mock_ec2
from fake_arm import FakeArm
from pools_bench import PoolsBench, open_pools_bench
from provider_benches import StaticBench
from varuna_manager.domain.pools import PoolTerms
from varuna_manager.providers.azure import AzureProvider
from varuna_manager.providers.base import PooledProvider, ProviderPartlyAwayError, ProviderRefusedError, RefusalKind
from varuna_manager.providers.conformance import KindConformance, ProviderConformance
from varuna_manager.providers.pools.provider import Pool, PoolsProvider
from virtual_loop import in_virtual_time

pytestmark = pytest.mark.xdist_group("ec2")


@pytest.fixture(scope="module")
def aws() -> Iterator[None]:
    with mock_ec2():
        yield


def open_bench() -> AbstractAsyncContextManager[PoolsBench]:
    return open_pools_bench(fleet=f"f{uuid.uuid4().hex[:30]}")


@pytest.mark.usefixtures("aws")
class TestPools(ProviderConformance):
    def open_bench(self, folder: Path) -> AbstractAsyncContextManager[PoolsBench]:
        return open_bench()


class TestPoolsKind(KindConformance):
    name = "pools"


@pytest.mark.usefixtures("aws")
async def test_vms_carry_their_pool_and_what_its_own_provider_leaves_open() -> None:
    async with open_bench() as bench:
        assert isinstance(bench.provider, PooledProvider)
        (first,) = (await bench.provider.create_in("azure-1", 1, "request-1")).vms
        (second,) = (await bench.provider.create_in("aws-1", 1, "request-2")).vms
        listed = {vm.id: vm for vm in await bench.provider.list()}
        assert listed.keys() == {first.id, second.id}
        of_azure, of_aws = listed[first.id], listed[second.id]
        assert (of_azure.pool, of_azure.zone, of_azure.machine_type) == ("azure-1", "westeurope", "Standard_A")
        assert of_aws.pool == "aws-1"
        assert of_aws.zone.startswith("eu-west-1")
        assert of_aws.price_per_hour is not None
        offers = await bench.provider.list_pool_offers()
        assert {name: offer.gpu_type for name, offer in offers.items()} == {"azure-1": "V100", "aws-1": "V100"}


@pytest.mark.usefixtures("aws")
async def test_a_pool_that_does_not_answer_hides_none_of_the_others_and_keeps_its_vms() -> None:
    async with open_bench() as bench:
        assert isinstance(bench.provider, PooledProvider)
        (ours,) = (await bench.provider.create_in("azure-1", 1, "request-1")).vms
        (theirs,) = (await bench.provider.create_in("aws-1", 1, "request-2")).vms
        await bench.aws.cut_off()
        with pytest.raises(ProviderPartlyAwayError, match="pool aws-1 does not answer") as raised:
            await bench.provider.list()
        assert [vm.id for vm in raised.value.vms] == [ours.id]
        assert raised.value.pools.keys() == {"aws-1"}
        with pytest.raises(ProviderRefusedError, match="aws-1"):
            await bench.provider.delete([ours.id, theirs.id])
        await bench.aws.reconnect()
        assert [vm.id for vm in await bench.provider.list() if not vm.going] == [theirs.id]


@in_virtual_time
async def test_a_pool_that_hangs_holds_up_no_other() -> None:
    arm, providers = FakeArm(url="http://azure.test"), {}
    for name in ("first", "second"):
        settings = SETTINGS.model_copy(update={"scale_set": name})
        providers[name] = AzureProvider(settings, arm.client_without_network(settings, 5.0), boot_script)
    terms = {name: PoolTerms(name=name, price_per_hour=1.0) for name in providers}
    pools = PoolsProvider([Pool(terms[name], provider) for name, provider in providers.items()])
    for name in providers:
        await pools.create_in(name, 1, f"request-of-{name}")
    async with held_answer(providers["first"], "list"):
        with pytest.raises(
            ProviderPartlyAwayError, match=r"pool first does not answer \(.*no answer within 30 s\)"
        ) as away:
            await pools.list()
        assert [vm.pool for vm in away.value.vms] == ["second"]
    assert {vm.pool for vm in await pools.list()} == {"first", "second"}
    await pools.close(end_vms=False)


@pytest.mark.usefixtures("aws")
async def test_what_one_pool_refuses_another_gives() -> None:
    async with open_bench() as bench:
        await bench.aws.refuse_creations(RefusalKind.CAPACITY, 1)  # which costs less by moto's prices
        created = await bench.provider.create(3, "request-1")
        assert created.refusal is None
        assert [vm.pool for vm in created.vms] == ["aws-1", "azure-1", "azure-1"]


@pytest.mark.usefixtures("aws")
async def test_a_pool_never_has_more_vms_than_its_settings_allow() -> None:
    async with open_bench() as bench:
        small = PoolTerms(name="small", price_per_hour=1.0, max_vms=2)
        provider = PoolsProvider([Pool(small, bench.azure.provider)])
        created = await provider.create(3, "request-1")
        assert len(created.vms) == 2
        assert created.refusal is not None
        assert created.refusal.kind is RefusalKind.QUOTA
        assert created.refusal.reason == "every pool has as many VMs as its max_vms allows"


@pytest.mark.usefixtures("aws")
async def test_two_pools_that_list_the_same_vm_are_told_apart_by_nobody() -> None:
    async with open_bench() as bench:
        terms = [PoolTerms(name=name, price_per_hour=1.0) for name in ("one", "two")]
        provider = PoolsProvider([Pool(each, bench.azure.provider) for each in terms])
        await provider.create_in("one", 1, "request-1")
        with pytest.raises(ProviderRefusedError, match=r"pools one and two both list VM .*different fleets"):
            await provider.list()


def test_hosts_of_a_list_are_no_pool() -> None:
    with pytest.raises(ValueError, match="pool rack: VMs of 'static' can be neither requested nor given back"):
        PoolsProvider([Pool(PoolTerms(name="rack", price_per_hour=0.0), StaticBench().provider)])
