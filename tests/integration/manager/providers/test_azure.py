"""The Azure provider with Azure's own SDK against a fake Azure Resource Manager."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from azure.mgmt.compute.models import VirtualMachine

from fake_arm import FakeArm, fake_arm
from held_listing import ENOUGH_S
from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.providers import azure_retail
from varuna_manager.providers.azure import AzureProvider
from varuna_manager.providers.azure_settings import AzureSettings, AzureSize, read_azure_settings
from varuna_manager.providers.base import ProviderRefusedError, UnknownVmError, UnsupportedByProviderError
from waiting import DEADLINE_S

A100, V100 = "Standard_NC24ads_A100_v4", "Standard_NC6s_v3"
SETTINGS = AzureSettings(
    subscription_id="00000000-0000-0000-0000-000000000000",
    resource_group="training",
    location="westeurope",
    sizes=(
        AzureSize(name=A100, gpus=1, device_memory_gib=80, zones=("1", "2")),
        AzureSize(name=V100, gpus=1, zones=("1",)),
    ),
    image="Canonical:ubuntu-24_04-lts:server:latest",
    subnet_id="/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/vms",
    ssh_public_key="ssh-ed25519 AAAA",
    list_every_s=0,
    retail_prices_url="",
)


@pytest.fixture
def arm() -> Iterator[FakeArm]:
    with fake_arm() as served:
        yield served


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def boot_script(name: str, size: AzureSize) -> str:
    return f"#cloud-config\n# {name} {size.name}\n"


def provider_on(arm: FakeArm, clock: Clock, settings: AzureSettings = SETTINGS, **options: Any) -> AzureProvider:
    return AzureProvider(settings, arm.client(settings), boot_script, settle_s=DEADLINE_S, now=clock, **options)


@pytest.fixture(autouse=True)
def patient_with_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure_retail, "_TIMEOUT_S", DEADLINE_S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def provider(arm: FakeArm, clock: Clock) -> AsyncIterator[AzureProvider]:
    made = provider_on(arm, clock)
    yield made
    await made.close(end_vms=False)


async def test_a_list_that_was_begun_before_another_does_not_hide_what_that_one_has(arm: FakeArm, clock: Clock) -> None:
    provider = provider_on(arm, clock, SETTINGS.model_copy(update={"list_every_s": 3600.0}))
    fetch, is_held, may_arrive = provider._fetch_vms, asyncio.Event(), asyncio.Event()

    async def hold_first() -> Sequence[VirtualMachine]:
        vms = await fetch()
        if not is_held.is_set():
            is_held.set()
            await may_arrive.wait()
        return vms

    with patch.object(provider, "_fetch_vms", hold_first):
        early = asyncio.create_task(provider.list())
        await is_held.wait()
        late = asyncio.create_task(provider.create(1, "r"))
        await asyncio.wait({late}, timeout=ENOUGH_S)
        may_arrive.set()
        await early
        (made,) = (await late).vms
        assert [vm.id for vm in await provider.list()] == [made.id]
    await provider.close(end_vms=False)


async def test_nothing_is_there_before_the_scale_set(provider: AzureProvider) -> None:
    assert list(await provider.list()) == []


async def test_32_spot_vms_are_made_in_one_flexible_scale_set(arm: FakeArm, provider: AzureProvider) -> None:
    created = await provider.create(32, "Request-1")
    assert created.refusal is None
    assert len(created.vms) == 32
    assert {vm.request for vm in created.vms} == {"Request-1"}
    assert {(vm.gpus, vm.device_memory_bytes) for vm in created.vms} == {(1, 80 << 30)}
    scale_set = arm.scale_sets["varuna"]["properties"]
    assert (scale_set["orchestrationMode"], scale_set["platformFaultDomainCount"]) == ("Flexible", 1)
    vm = arm.vms["varuna-request1-007"]
    properties = vm.body["properties"]
    assert (properties["priority"], properties["evictionPolicy"]) == ("Spot", "Delete")
    assert properties["billingProfile"] == {"maxPrice": -1}
    assert properties["virtualMachineScaleSet"]["id"].endswith("/virtualMachineScaleSets/varuna")
    assert vm.body["zones"] == ["1"]
    assert (
        base64.b64decode(properties["osProfile"]["customData"]).decode()
        == f"#cloud-config\n# varuna-request1-007 {A100}\n"
    )


async def test_a_request_made_again_makes_no_vm_twice(arm: FakeArm, clock: Clock, provider: AzureProvider) -> None:
    await provider.create(3, "first")
    after_restart = provider_on(arm, clock)
    again = await after_restart.create(3, "first")
    other = await after_restart.create(2, "second")
    await after_restart.close(end_vms=False)
    assert sorted(vm.id for vm in again.vms) == [f"varuna-first-00{n}" for n in range(3)]
    assert sorted(vm.id for vm in other.vms) == [f"varuna-second-00{n}" for n in range(2)]
    assert len(arm.vms) == 5


async def test_a_manager_that_died_in_the_middle_leaves_nothing_behind(
    arm: FakeArm, clock: Clock, provider: AzureProvider
) -> None:
    await provider.create(2, "first")  # of 5: it died after these
    after_restart = provider_on(arm, clock)
    finished = await after_restart.create(5, "first")
    await after_restart.close(end_vms=False)
    assert len(finished.vms) == len(arm.vms) == 5


async def test_vms_of_others_are_neither_seen_nor_touched(arm: FakeArm, provider: AzureProvider) -> None:
    await provider.create(1, "ours")
    stranger = dict(arm.vms["varuna-ours-000"].body)
    stranger["tags"] = {"owner": "somebody"}
    arm.put_vm("theirs", stranger)
    assert [vm.id for vm in await provider.list()] == ["varuna-ours-000"]


async def test_evicted_vms_are_gone_from_the_list(arm: FakeArm, provider: AzureProvider) -> None:
    await provider.create(32, "r")
    lost = sorted(arm.vms)[:6]
    arm.evict(*lost)
    left = {vm.id for vm in await provider.list()}
    assert len(left) == 26
    assert not left & set(lost)


@pytest.mark.parametrize("at_once", [True, False], ids=["said-by-the-request", "said-by-its-operation"])
async def test_without_capacity_the_next_zone_and_size_are_tried_and_nothing_is_left_over(
    arm: FakeArm, provider: AzureProvider, at_once: bool
) -> None:
    arm.refuses_at_once = at_once
    arm.capacity = {(A100, "1"): 4, (A100, "2"): 2, (V100, "1"): 3}
    created = await provider.create(12, "r")
    assert len(created.vms) == 9
    assert created.refusal is not None
    assert created.refusal.kind is RefusalKind.CAPACITY
    assert ("SkuNotAvailable" if at_once else "AllocationFailed") in created.refusal.reason
    places = [arm.vms[vm.id].place for vm in created.vms]
    assert {place: places.count(place) for place in places} == arm.capacity
    assert len(arm.vms) == 9  # those that failed were cleared away


async def test_a_place_that_refused_is_left_alone_for_a_while(
    arm: FakeArm, clock: Clock, provider: AzureProvider
) -> None:
    arm.refuses_at_once = True
    arm.capacity = {(A100, "1"): 0, (A100, "2"): 0, (V100, "1"): 0}
    assert (await provider.create(1, "a")).refusal is not None
    asked = len(arm.writes("virtualMachines/"))
    at_once = await provider.create(1, "a")
    assert len(arm.writes("virtualMachines/")) == asked
    assert at_once.refusal is not None
    assert at_once.refusal.retry_after_s is not None
    clock.now += 3600.0
    arm.capacity = {}
    created = await provider.create(1, "a")
    assert len(created.vms) == 1
    assert arm.vms[created.vms[0].id].place == (A100, "1")


async def test_the_quota_is_told_as_such(arm: FakeArm, provider: AzureProvider) -> None:
    arm.quota = 3
    created = await provider.create(5, "r")
    assert len(created.vms) == 3
    assert created.refusal is not None
    assert created.refusal.kind is RefusalKind.QUOTA
    assert "quota" in created.refusal.reason


async def test_a_short_retry_after_is_waited_out(arm: FakeArm, provider: AzureProvider) -> None:
    arm.throttle = [0.01, 0.01]
    created = await provider.create(2, "r")
    assert created.refusal is None
    assert len(created.vms) == 2


async def test_a_long_retry_after_becomes_a_refusal(arm: FakeArm, provider: AzureProvider) -> None:
    arm.throttle = [300.0] * 10
    created = await provider.create(2, "r")
    assert created.vms == ()
    assert created.refusal is not None
    assert created.refusal.kind is RefusalKind.THROTTLED
    assert created.refusal.retry_after_s == 300.0


async def test_our_own_budget_of_requests_is_kept(arm: FakeArm, clock: Clock) -> None:
    modest = provider_on(arm, clock, SETTINGS.model_copy(update={"writes_per_minute": 5}))
    created = await modest.create(8, "r")
    assert len(created.vms) == 5
    assert created.refusal is not None
    assert (created.refusal.kind, created.refusal.retry_after_s) == (RefusalKind.THROTTLED, 60.0)
    clock.now += 60.0
    assert len((await modest.create(8, "r")).vms) == 8
    await modest.close(end_vms=False)


async def test_errors_of_the_server_are_tried_again(arm: FakeArm, provider: AzureProvider) -> None:
    arm.failures = [500, 503, 500]
    created = await provider.create(2, "r")
    assert len(created.vms) == 2


async def test_a_server_that_stays_broken_is_a_refusal(arm: FakeArm, provider: AzureProvider) -> None:
    arm.failures = [500] * 200
    created = await provider.create(2, "r")
    assert created.refusal is not None
    assert created.refusal.kind is RefusalKind.FAILED


async def test_deletes_go_in_batches_and_may_be_slow_or_repeated(arm: FakeArm, provider: AzureProvider) -> None:
    arm.slow_operations = 3
    await provider.create(12, "r")
    names = sorted(arm.vms)
    await provider.delete([*names[:5], "varuna-r-999"])
    await provider.delete(names[:5])
    while {*names[:5]} & set(arm.vms):
        await provider.list()
    assert sorted(arm.vms) == names[5:]
    left = len(arm.writes("virtualMachineScaleSets/varuna/delete"))
    await provider.delete(names[5:])
    assert len(arm.writes("virtualMachineScaleSets/varuna/delete")) == left + 1


@pytest.mark.parametrize(("code", "power"), [("AllocationFailed", ""), ("OSProvisioningTimedOut", "deallocated")])
async def test_a_vm_that_fails_late_is_cleared_away(
    arm: FakeArm, provider: AzureProvider, code: str, power: str
) -> None:
    await provider.create(2, "r")
    arm.fail("varuna-r-001", code, power)
    assert [vm.id for vm in await provider.list()] == ["varuna-r-000"]
    while "varuna-r-001" in arm.vms:
        await provider.list()
    assert sorted(arm.vms) == ["varuna-r-000"]


@pytest.mark.parametrize("power", ["running", "starting", ""])
async def test_a_vm_that_runs_is_not_deleted_for_an_operation_that_failed(
    arm: FakeArm, provider: AzureProvider, power: str
) -> None:
    await provider.create(2, "r")
    arm.fail("varuna-r-001", "VMExtensionProvisioningError", power)
    for _ in range(3):
        assert [vm.id for vm in await provider.list()] == ["varuna-r-000", "varuna-r-001"]
    assert sorted(arm.vms) == ["varuna-r-000", "varuna-r-001"]
    assert not arm.writes("/delete")


@pytest.mark.parametrize("knobs", [{"throttle_polls": [300.0]}, {"fails_running": "OSProvisioningTimedOut"}])
async def test_a_vm_that_may_run_is_not_deleted_when_its_creation_ends_in_an_error(
    arm: FakeArm, provider: AzureProvider, knobs: dict[str, Any]
) -> None:
    for knob, value in knobs.items():
        setattr(arm, knob, value)
    created = await provider.create(1, "r")
    assert ([vm.id for vm in created.vms], created.refusal) == (["varuna-r-000"], None)
    assert [vm.id for vm in await provider.list()] == ["varuna-r-000"]
    assert not [path for method, path in arm.requests if method == "DELETE" or path.endswith("/delete")]


async def test_a_failed_vm_that_azure_does_not_delete_hides_no_other(
    arm: FakeArm, clock: Clock, provider: AzureProvider
) -> None:
    await provider.create(3, "r")
    arm.fail("varuna-r-001", "AllocationFailed", "")
    arm.locked = {"varuna-r-001"}
    for _ in range(5):
        assert [vm.id for vm in await provider.list()] == ["varuna-r-000", "varuna-r-002"]
    assert len(arm.writes("/delete")) == 1, "it is not asked again with each look"
    assert len((await provider.create(3, "s")).vms) == 3
    arm.locked = set()
    clock.now += 120.0
    while "varuna-r-001" in arm.vms:
        await provider.list()


async def test_a_vm_that_azure_does_not_delete_keeps_no_other(
    arm: FakeArm, clock: Clock, provider: AzureProvider
) -> None:
    await provider.create(4, "r")
    names = sorted(arm.vms)
    arm.locked = {names[1]}
    with pytest.raises(ProviderRefusedError, match="locked"):
        await provider.delete(names)
    while len(arm.vms) > 1:
        await provider.list()
    assert sorted(arm.vms) == [names[1]]
    asked = len(arm.writes("/delete"))
    await provider.delete(names[1:2])
    assert len(arm.writes("/delete")) == asked, "it is left alone for a while"
    arm.locked = set()
    clock.now += 120.0
    await provider.delete(names[1:2])
    while arm.vms:
        await provider.list()


async def test_a_size_without_accelerated_networking_is_made_without(arm: FakeArm, provider: AzureProvider) -> None:
    arm.unaccelerated = {A100}
    created = await provider.create(3, "r")
    assert created.refusal is None
    assert {arm.vms[vm.id].place for vm in created.vms} == {(A100, "1")}
    asked = len(arm.vm_writes())
    await provider.create(2, "s")
    assert len(arm.vm_writes()) == asked + 2, "Azure's answer about the size is remembered"


async def test_accelerated_networking_can_be_turned_off_for_a_size(arm: FakeArm, clock: Clock) -> None:
    arm.unaccelerated = {A100}
    sizes = (SETTINGS.sizes[0].model_copy(update={"accelerated_networking": False}),)
    without = provider_on(arm, clock, SETTINGS.model_copy(update={"sizes": sizes}))
    assert (await without.create(1, "r")).refusal is None
    assert len(arm.vm_writes()) == 1
    await without.close(end_vms=False)


async def test_a_scale_set_of_other_zones_is_named_before_azure_refuses_each_vm(arm: FakeArm, clock: Clock) -> None:
    arm.scale_sets["varuna"] = {"name": "varuna", "id": "x/varuna", "zones": ["2", "3"]}
    unfit = provider_on(arm, clock)
    created = await unfit.create(2, "r")
    assert created.refusal is not None
    assert "scale set varuna has zones 2, 3 and the sizes of the settings zones 1, 2" in created.refusal.reason
    assert not arm.vm_writes()
    await unfit.close(end_vms=False)


def test_sizes_with_and_without_zones_do_not_go_into_one_scale_set() -> None:
    mixed = {**SETTINGS.model_dump(), "sizes": [{"name": A100, "gpus": 1, "zones": ["1"]}, {"name": V100, "gpus": 1}]}
    with pytest.raises(ValueError, match=f"{V100} has no zones and others have.*give all sizes zones, or none"):
        AzureSettings.model_validate(mixed)


async def test_prices_and_evictions_make_the_offer(arm: FakeArm, provider: AzureProvider) -> None:
    arm.market = {A100.lower(): ("0.73", "5-10"), V100.lower(): ("0.4", "20+")}
    offer = await provider.get_offer()
    assert (offer.gpus, offer.price_per_hour) == (1, 0.73)
    assert offer.hazard_per_hour == pytest.approx(-math.log(1 - 0.075))
    created = await provider.create(1, "r")
    assert created.vms[0].price_per_hour == 0.73


async def test_a_market_that_says_nothing_is_no_error(arm: FakeArm, provider: AzureProvider) -> None:
    arm.failures = [403]
    offer = await provider.get_offer()
    assert (offer.price_per_hour, offer.hazard_per_hour) == (None, None)


async def test_prices_come_from_the_public_list_where_the_subscription_may_not_be_read(
    arm: FakeArm, clock: Clock
) -> None:
    arm.may_read_subscription = False
    arm.retail = {A100: 0.81, V100: 0.35}
    settings = SETTINGS.model_copy(update={"retail_prices_url": f"{arm.url}/api/retail/prices"})
    thrifty = provider_on(arm, clock, settings, needs_prices=True)
    assert (await thrifty.get_offer()).price_per_hour == 0.81
    created = await thrifty.create(2, "r")
    assert created.refusal is None
    assert [vm.price_per_hour for vm in created.vms] == [0.81, 0.81]
    await thrifty.close(end_vms=False)


async def test_a_price_holds_until_there_is_another(arm: FakeArm, clock: Clock) -> None:
    arm.may_read_subscription, arm.retail = False, {A100: 0.81, V100: 0.35}
    settings = SETTINGS.model_copy(
        update={"retail_prices_url": f"{arm.url}/api/retail/prices", "max_price_per_hour": 9.0}
    )
    provider = provider_on(arm, clock, settings)
    for hour, retail, status, price in ((0, 0.81, 200, 0.81), (1, 0.9, 503, 0.81), (2, 0.9, 200, 0.9)):
        clock.now = hour * 3600.0
        arm.retail_status, arm.retail = status, {A100: retail, V100: 0.35}
        assert (await provider.get_offer()).price_per_hour == price
    await provider.close(end_vms=False)


async def test_the_first_list_of_a_manager_has_the_prices_of_the_market(arm: FakeArm, clock: Clock) -> None:
    arm.market = {A100.lower(): ("0.73", "5-10")}
    settings = SETTINGS.model_copy(update={"max_price_per_hour": 9.0})
    before = provider_on(arm, clock, settings)
    await before.create(1, "r")
    await before.close(end_vms=False)
    after = provider_on(arm, clock, settings)
    assert [vm.price_per_hour for vm in await after.list()] == [0.73]
    await after.close(end_vms=False)


async def test_a_list_of_prices_that_cannot_be_read_is_asked_again_soon(arm: FakeArm, clock: Clock) -> None:
    arm.may_read_subscription, arm.retail_status, arm.retail = False, 503, {A100: 0.81}
    settings = SETTINGS.model_copy(update={"retail_prices_url": f"{arm.url}/api/retail/prices"})
    thrifty = provider_on(arm, clock, settings, needs_prices=True)
    assert (await thrifty.get_offer()).price_per_hour is None
    arm.retail_status = 200
    clock.now += 60.0
    assert (await thrifty.get_offer()).price_per_hour == 0.81
    await thrifty.close(end_vms=False)


async def test_vms_are_listed_only_so_often(arm: FakeArm, clock: Clock) -> None:
    seldom = provider_on(arm, clock, SETTINGS.model_copy(update={"list_every_s": 2.0}))
    await seldom.create(3, "r")
    asked = len(arm.requests)
    arm.evict("varuna-r-001")
    assert len(await seldom.list()) == 3
    assert len(arm.requests) == asked
    clock.now += 2.0
    assert len(await seldom.list()) == 2
    await seldom.close(end_vms=False)


async def test_a_request_never_has_more_vms_than_asked_for(arm: FakeArm, clock: Clock, provider: AzureProvider) -> None:
    await provider.create(6, "r")
    arm.evict("varuna-r-000", "varuna-r-001")
    after_restart = provider_on(arm, clock)
    assert len((await after_restart.create(5, "r")).vms) == 5
    assert len(arm.vms) == 5
    await after_restart.close(end_vms=False)


async def test_a_vm_that_the_list_does_not_show_yet_is_not_made_twice_and_not_deleted(
    arm: FakeArm, clock: Clock, provider: AzureProvider
) -> None:
    await provider.create(3, "r")
    arm.hidden = {"varuna-r-001"}
    after_restart = provider_on(arm, clock)
    created = await after_restart.create(3, "r")
    assert created.refusal is None
    assert sorted(arm.vms) == ["varuna-r-000", "varuna-r-001", "varuna-r-002"]
    assert not [path for method, path in arm.requests if method == "DELETE"]
    await after_restart.close(end_vms=False)


async def test_a_place_that_refused_is_asked_for_one_vm_before_the_others(
    arm: FakeArm, clock: Clock, provider: AzureProvider
) -> None:
    arm.refuses_at_once = True
    arm.capacity = {(A100, "1"): 0, (A100, "2"): 0, (V100, "1"): 0}
    await provider.create(8, "a")
    for _ in range(4):
        clock.now += 60.0
        before = len(arm.vm_writes())
        await provider.create(8, "a")
        assert len(arm.vm_writes()) == before + 3  # one for each place
    clock.now += 60.0
    arm.capacity = {}
    assert len((await provider.create(8, "a")).vms) == 8


async def test_an_allocation_that_fails_late_is_cleared_away_and_its_place_left_alone(
    arm: FakeArm, clock: Clock
) -> None:
    arm.capacity = {(A100, "1"): 0}
    hasty = AzureProvider(SETTINGS, arm.client(SETTINGS), boot_script, settle_s=0.0, now=clock)
    created = await hasty.create(2, "r")
    assert created.refusal is None  # nobody knows yet
    while arm.vms:
        await hasty.list()
    again = await hasty.create(2, "s")
    assert {arm.vms[vm.id].place for vm in again.vms} == {(A100, "2")}
    await hasty.close(end_vms=False)


async def test_a_limit_of_cost_is_reckoned_with_the_dearest_size(arm: FakeArm, clock: Clock) -> None:
    arm.market = {A100.lower(): ("0.5", "0-5"), V100.lower(): ("0.9", "0-5")}
    thrifty = provider_on(arm, clock, needs_prices=True)
    assert (await thrifty.get_offer()).price_per_hour == 0.9
    await thrifty.close(end_vms=False)


async def test_without_prices_a_fleet_with_a_limit_of_cost_gets_no_vm(arm: FakeArm, clock: Clock) -> None:
    thrifty = provider_on(arm, clock, needs_prices=True)
    assert (await thrifty.get_offer()).price_per_hour is None
    created = await thrifty.create(2, "r")
    assert not arm.vms
    assert created.refusal is not None
    assert "give each size its price_per_hour" in created.refusal.reason
    await thrifty.close(end_vms=False)
    sizes = (SETTINGS.sizes[0], SETTINGS.sizes[1].model_copy(update={"price_per_hour": 0.4}))
    thrifty = provider_on(arm, clock, SETTINGS.model_copy(update={"sizes": sizes}), needs_prices=True)
    assert (await thrifty.get_offer()).price_per_hour == 0.4
    assert {arm.vms[vm.id].size for vm in (await thrifty.create(2, "r")).vms} == {V100}
    await thrifty.close(end_vms=False)


async def test_a_vm_that_is_being_deleted_is_listed_as_going(arm: FakeArm, provider: AzureProvider) -> None:
    await provider.create(2, "r")
    arm.vms["varuna-r-000"].state = "Deleting"
    assert {vm.id: vm.going for vm in await provider.list()} == {"varuna-r-000": True, "varuna-r-001": False}
    created = await provider.create(2, "r")  # its name is still taken
    assert sorted(vm.id for vm in created.vms) == ["varuna-r-001", "varuna-r-002"]


async def test_deletes_wait_as_long_as_azure_wants(arm: FakeArm, clock: Clock, provider: AzureProvider) -> None:
    await provider.create(2, "r")
    arm.throttle_deletes = [120.0]
    await provider.delete(sorted(arm.vms))
    await provider.delete(sorted(arm.vms))
    assert len(arm.writes("virtualMachineScaleSets/varuna/delete")) == 1
    clock.now += 120.0
    await provider.delete(sorted(arm.vms))
    while arm.vms:
        await provider.list()


async def test_a_vm_is_preempted_by_azures_own_simulation(arm: FakeArm, provider: AzureProvider) -> None:
    await provider.create(2, "r")
    await provider.preempt_vm("varuna-r-000", 0.0)
    assert [vm.id for vm in await provider.list()] == ["varuna-r-001"]
    with pytest.raises(UnknownVmError, match="no VM 'varuna-r-000'"):
        await provider.preempt_vm("varuna-r-000", 0.0)
    with pytest.raises(UnsupportedByProviderError, match="a notice of its own"):
        await provider.preempt_vm("varuna-r-001", 30.0)
    arm.failures = [403]
    with pytest.raises(ProviderRefusedError, match="try again"):
        await provider.preempt_vm("varuna-r-001", 0.0)


def document(**changes: Any) -> dict[str, Any]:
    return {**SETTINGS.model_dump(mode="json"), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "ubuntu"}, "image 'ubuntu': give publisher:offer:sku:version"),
        ({"sizes": []}, "sizes"),
        ({"scale_set": "No Good"}, "scale_set 'No Good'"),
        ({"colour": "red"}, "colour 'red'"),
    ],
)
def test_wrong_settings_are_told_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    import yaml

    path = tmp_path / "azure.yaml"
    path.write_text(yaml.safe_dump(document(**changes)))
    with pytest.raises(ValueError, match=r"azure\.yaml") as raised:
        read_azure_settings(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_settings_come_from_a_file(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "azure.yaml"
    path.write_text(yaml.safe_dump(document()))
    assert read_azure_settings(path) == SETTINGS


def test_the_settings_may_be_toml(tmp_path: Path) -> None:
    path = tmp_path / "azure.toml"
    path.write_text(
        'subscription_id = "s"\nresource_group = "g"\nlocation = "westeurope"\nimage = "/images/mine"\n'
        'subnet_id = "/subnets/vms"\nssh_public_key = "ssh-ed25519 AAAA"\nsizes = [{name = "Standard_A", gpus = 2}]\n'
    )
    assert read_azure_settings(path).sizes == (AzureSize(name="Standard_A", gpus=2),)
    path.write_text("sizes = [")
    with pytest.raises(ValueError, match=r"azure\.toml: not TOML"):
        read_azure_settings(path)
