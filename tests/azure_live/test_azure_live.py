"""A spot VM in a real subscription: made, found again, evicted by Azure's simulation, deleted. Some cents, 15 minutes.

az login
VARUNA_AZURE_LIVE=/etc/varuna/azure.yaml .venv/bin/pytest tests/azure_live -s --timeout 2400
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from varuna_manager.providers.azure import AzureProvider, make_azure_client
from varuna_manager.providers.azure_settings import AzureSettings, AzureSize
from varuna_manager.providers.base import CreatedVms, UnknownVmError

pytestmark = [pytest.mark.timeout(2400), pytest.mark.xdist_group("azure-live")]


async def boot_script(name: str, size: AzureSize) -> str:
    """Nothing is installed: these tests are about Azure, not about agents."""
    return "#cloud-config\n{}\n"


@pytest.fixture
async def provider(live_settings: AzureSettings) -> AsyncIterator[AzureProvider]:
    """Deletes what a test leaves behind, also when it fails."""
    client = make_azure_client(live_settings)
    made = AzureProvider(live_settings, client, boot_script, settle_s=240.0)
    try:
        yield made
    finally:
        group, name = live_settings.resource_group, live_settings.scale_set
        await (await client.virtual_machine_scale_sets.begin_delete(group, name, force_deletion=True)).result()
        await made.close(end_vms=False)


async def until(condition: Callable[[], Awaitable[bool]], what: str, deadline_s: float) -> None:
    give_up = time.monotonic() + deadline_s
    while not await condition():
        assert time.monotonic() < give_up, f"{what}: not within {deadline_s:.0f} s"
        await asyncio.sleep(5.0)


async def made_vm(provider: AzureProvider) -> str:
    created: CreatedVms = await provider.create(1, uuid.uuid4().hex)
    if created.refusal is not None:
        pytest.skip(f"Azure grants no spot VM now: {created.refusal.reason}")
    (vm,) = created.vms
    return vm.id


async def test_prices_and_eviction_rates_are_told(provider: AzureProvider) -> None:
    offer = await provider.get_offer()
    assert offer.price_per_hour, "the identity may not ask Azure Resource Graph, or the size has no spot price here"
    assert offer.hazard_per_hour is not None


async def test_a_vm_is_made_found_again_and_deleted(provider: AzureProvider, live_settings: AzureSettings) -> None:
    name = await made_vm(provider)
    after_restart = AzureProvider(live_settings, make_azure_client(live_settings), boot_script)
    assert [vm.id for vm in await after_restart.list()] == [name]
    await after_restart.delete([name])

    async def is_gone() -> bool:
        return not [vm for vm in await after_restart.list() if vm.id == name]

    await until(is_gone, "the deletion", 900.0)
    with pytest.raises(UnknownVmError):
        await after_restart.preempt_vm(name, 0.0)
    await after_restart.close(end_vms=False)


async def test_a_vm_that_azure_evicts_goes_from_the_list(provider: AzureProvider) -> None:
    name = await made_vm(provider)
    await provider.preempt_vm(name, 0.0)

    async def is_gone() -> bool:
        return not [vm for vm in await provider.list() if vm.id == name and not vm.going]

    await until(is_gone, "the eviction", 1200.0)
