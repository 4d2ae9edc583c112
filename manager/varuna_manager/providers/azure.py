"""Spot VMs of Azure: a Flexible scale set, whose VMs are made one by one.

One by one, because a VM's name then says which request it belongs to: making a request again makes no VM twice,
and each VM starts with a token of its own. Being in one scale set lets Azure place them together, and a single call
delete many. The facts that this rests on are in Microsoft's pages "Attach or detach a virtual machine to or from a
scale set", "Spot Virtual Machines for scale sets" and "Throttling limits for Virtual Machines".
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError
from azure.core.pipeline.policies import AsyncRetryPolicy
from azure.core.polling import AsyncLROPoller
from azure.mgmt.compute.aio import ComputeManagementClient
from azure.mgmt.compute.models import VirtualMachine

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind, backoff_s
from varuna_manager.providers.azure_market import Quote, ask_market, refusal_of
from varuna_manager.providers.azure_requests import FLEET_TAG, REQUEST_TAG, scale_set_body, vm_body
from varuna_manager.providers.azure_settings import AzureSettings, AzureSize
from varuna_manager.providers.base import Created, Notice, Offer, ProviderVm

__all__ = ["AzureProvider", "PatientRetryPolicy", "azure_client"]

_LISTED_STATES = frozenset({"Creating", "Succeeded", "Updating"})
_DELETE_AT_ONCE = 100
_AT_ONCE = 32
"""Creations under way at the same time."""
_MARKET_S = 600.0
_LONGEST_WAIT_S = 10.0
"""A longer Retry-After is not slept through: it becomes a refusal, which the fleet controller waits out."""
_GIB = 1 << 30

BootScript = Callable[[str], Awaitable[str]]
"""The cloud-init document for a VM of this name; it holds the VM's join token."""

Place = tuple[AzureSize, str | None]
"""A size, and the zone to make it in."""


class PatientRetryPolicy(AsyncRetryPolicy[Any, Any]):
    """The SDK's, but for long waits: it would sleep them out in the middle of a call."""

    def is_retry(self, settings: dict[str, Any], response: Any) -> bool:
        wait_s = self.get_retry_after(response)
        return (wait_s is None or wait_s <= _LONGEST_WAIT_S) and bool(super().is_retry(settings, response))


def azure_client(settings: AzureSettings) -> ComputeManagementClient:
    """With the manager VM's identity, or whatever else DefaultAzureCredential finds."""
    from azure.identity.aio import DefaultAzureCredential

    return ComputeManagementClient(
        DefaultAzureCredential(), settings.subscription_id, retry_policy=PatientRetryPolicy(retry_total=4)
    )


class AzureProvider:
    """See the module's text. `client` is closed by `close`."""

    name = "azure"
    grows = True

    def __init__(
        self,
        settings: AzureSettings,
        client: ComputeManagementClient,
        boot_script: BootScript,
        *,
        settle_s: float = 45.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settle_s`: how long `create` waits for allocations; what is undecided then counts as made."""
        self._settings = settings
        self._client = client
        self._boot_script = boot_script
        self._settle_s = settle_s
        self._now = now
        self._has_scale_set = False
        self._refused: dict[tuple[str, str | None], tuple[int, float]] = {}
        """By size and zone: refusals in a row, and until when it is not asked again."""
        self._writes: deque[float] = deque()
        self._quotes: Mapping[str, Quote] = {}
        self._quoted_at: float | None = None
        self._deleting: set[str] = set()
        self._under_way: set[asyncio.Task[object]] = set()
        self._log = structlog.get_logger("varuna.azure").bind(scale_set=settings.scale_set)

    # ------------------------------------------------------------ what there is

    async def list(self) -> Sequence[ProviderVm]:
        vms = await self._vms()
        failed = [_name(vm) for vm in vms if vm.provisioning_state == "Failed"]
        if failed:
            # They never came up, and still count against the quota.
            self._log.warning("VMs that could not be made are deleted", vms=failed)
            await self.delete(failed)
        return [self._seen(vm) for vm in vms if vm.provisioning_state in _LISTED_STATES]

    async def notices(self) -> Sequence[Notice]:
        """None from here: Azure tells the VM itself, whose agent asks the metadata service each second."""
        return ()

    async def offer(self) -> Offer:
        await self._refresh_quotes()
        size, _ = next(iter(self._places()), (self._settings.sizes[0], None))
        quote = self._quotes.get(size.name, Quote())
        return Offer(gpus=size.gpus, price_per_hour=quote.price_per_hour, hazard_per_hour=quote.hazard_per_hour)

    async def _vms(self) -> Sequence[VirtualMachine]:
        """Those of this fleet, in whatever state."""
        of_set = f"'virtualMachineScaleSet/id' eq '{self._settings.scale_set_id}'"
        found = self._client.virtual_machines.list(self._settings.resource_group, filter=of_set)
        try:
            vms = [vm async for vm in found]
        except ResourceNotFoundError:
            return []  # the scale set is not there yet
        return [vm for vm in vms if (vm.tags or {}).get(FLEET_TAG) == self._settings.scale_set]

    def _seen(self, vm: VirtualMachine) -> ProviderVm:
        size = self._size(vm.hardware_profile.vm_size if vm.hardware_profile else None)
        memory = size.device_memory_gib if size else None
        quote = self._quotes.get(size.name, Quote()) if size else Quote()
        return ProviderVm(
            id=_name(vm),
            gpus=size.gpus if size else 1,
            device_memory_bytes=None if memory is None else int(memory * _GIB),
            host="",  # its agent says it
            created_at=vm.time_created.timestamp() if vm.time_created else time.time(),
            ref={"id": vm.id, "size": size.name if size else None, "zones": [*(vm.zones or ())]},
            request=(vm.tags or {}).get(REQUEST_TAG),
            price_per_hour=quote.price_per_hour,
        )

    def _size(self, name: str | None) -> AzureSize | None:
        sizes = self._settings.sizes
        return next((size for size in sizes if name and size.name.lower() == name.lower()), None)

    async def _refresh_quotes(self) -> None:
        if self._quoted_at is not None and self._now() - self._quoted_at < _MARKET_S:
            return
        self._quoted_at = self._now()
        try:
            self._quotes = await ask_market(self._client, self._settings.location, self._settings.sizes)
        except (AzureError, KeyError, ValueError) as error:
            self._log.warning("Azure does not tell prices and eviction rates", error=str(error).splitlines()[0])

    # ------------------------------------------------------------ more

    async def create(self, count: int, request: str) -> Created:
        try:
            await self._ensure_scale_set()
            before = {vm.id: vm for vm in await self.list()}
        except AzureError as error:
            return Created(refusal=refusal_of(error))
        names = [f"{self._settings.scale_set}-{_short(request)}-{number:03d}" for number in range(count)]
        missing: Sequence[str] = [name for name in names if name not in before]
        refusal: Refusal | None = None
        for place in self._places():
            if not missing:
                break
            missing, refusal = await self._create_at(place, missing, request, refusal)
            if refusal is not None and refusal.kind is RefusalKind.THROTTLED:
                break
        if missing and refusal is None:
            refusal = self._all_refused()
        try:
            made = tuple(vm for vm in await self.list() if vm.request == request)
        except AzureError as error:
            return Created(refusal=refusal_of(error))
        return Created(vms=made, refusal=refusal if missing else None)

    async def _ensure_scale_set(self) -> None:
        if self._has_scale_set:
            return
        sets = self._client.virtual_machine_scale_sets
        group, name = self._settings.resource_group, self._settings.scale_set
        try:
            await sets.get(group, name)
        except ResourceNotFoundError:
            body: Any = scale_set_body(self._settings)
            poller = await sets.begin_create_or_update(group, name, body)
            await poller.result()
            self._log.info("the scale set was made")
        self._has_scale_set = True

    def _places(self) -> Sequence[Place]:
        """Sizes and zones in order of preference, without those that have just refused."""
        places = [(size, zone) for size in self._settings.sizes for zone in size.zones or (None,)]
        now = self._now()
        return [place for place in places if self._refused.get(_key(place), (0, 0.0))[1] <= now]

    async def _create_at(
        self, place: Place, names: Sequence[str], request: str, before: Refusal | None
    ) -> tuple[Sequence[str], Refusal | None]:
        """Try to make these VMs there; the names that could not be made, and why."""
        granted, retry_after_s = self._take_writes(len(names))
        gate = asyncio.Semaphore(_AT_ONCE)
        outcomes = await asyncio.gather(*(self._create_one(gate, place, name, request) for name in names[:granted]))
        refusals = [refusal for refusal in outcomes if refusal is not None]
        left = [name for name, refusal in zip(names, outcomes, strict=False) if refusal is not None]
        left += names[granted:]
        if len(refusals) < len(outcomes):
            self._refused.pop(_key(place), None)
        if any(refusal.kind in (RefusalKind.CAPACITY, RefusalKind.QUOTA) for refusal in refusals):
            self._note_refused(place, refusals[0])
        if granted < len(names):
            text = f"{self._settings.writes_per_minute} requests a minute are used up (writes_per_minute)"
            return left, Refusal(kind=RefusalKind.THROTTLED, reason=text, retry_after_s=retry_after_s)
        return left, _worst(refusals) or before

    async def _create_one(self, gate: asyncio.Semaphore, place: Place, name: str, request: str) -> Refusal | None:
        size, zone = place
        async with gate:
            try:
                script = await self._boot_script(name)
                body: Any = vm_body(self._settings, name, size, zone, request, script)
                group = self._settings.resource_group
                poller = await self._client.virtual_machines.begin_create_or_update(group, name, body)
                await self._settled(poller)
            except AzureError as error:
                refusal = refusal_of(error)
                self._log.info("Azure made no VM", vm=name, size=size.name, zone=zone, reason=refusal.reason)
                await self._clear_away(name)
                return refusal
        return None

    async def _settled(self, poller: AsyncLROPoller[Any]) -> None:
        """Wait for the allocation; what takes longer goes on, and `list` sees what becomes of it."""
        task = asyncio.ensure_future(poller.result())
        done, _ = await asyncio.wait({task}, timeout=self._settle_s)
        if done:
            task.result()
        else:
            self._under_way.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.info("Azure made no VM, as it says late", reason=str(error).splitlines()[0])

    async def _clear_away(self, name: str) -> None:
        """A VM whose allocation failed stays as a resource: its name is needed, and its disk costs."""
        try:
            poller = await self._client.virtual_machines.begin_delete(
                self._settings.resource_group, name, force_deletion=True
            )
            await self._settled(poller)
        except ResourceNotFoundError:
            return
        except AzureError as error:
            # It is in `list` as failed, from where it is tried again.
            self._log.warning("a VM that failed is still there", vm=name, error=str(error).splitlines()[0])

    def _take_writes(self, wanted: int) -> tuple[int, float]:
        """How many of the minute's requests are left for this, and after how many seconds there are more."""
        now = self._now()
        while self._writes and self._writes[0] <= now - 60.0:
            self._writes.popleft()
        granted = min(wanted, self._settings.writes_per_minute - len(self._writes))
        self._writes.extend([now] * granted)
        return granted, self._writes[0] + 60.0 - now if self._writes else 0.0

    def _note_refused(self, place: Place, refusal: Refusal) -> None:
        count = self._refused.get(_key(place), (0, 0.0))[0] + 1
        pause_s = backoff_s(count, refusal.kind)
        self._refused[_key(place)] = (count, self._now() + pause_s)

    def _all_refused(self) -> Refusal:
        soonest = min(until for _, until in self._refused.values()) - self._now()
        text = f"every size and zone has refused, the first is asked again in {soonest:.0f} s"
        return Refusal(kind=RefusalKind.CAPACITY, reason=text, retry_after_s=max(soonest, 0.0))

    # ------------------------------------------------------------ less

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """In batches, through the scale set. Returns once Azure has accepted it; raises AzureError."""
        wanted = [vm_id for vm_id in vm_ids if vm_id not in self._deleting]
        for start in range(0, len(wanted), _DELETE_AT_ONCE):
            await self._delete_batch(wanted[start : start + _DELETE_AT_ONCE])

    async def _delete_batch(self, names: Sequence[str]) -> None:
        body: Any = {"instanceIds": [*names]}
        try:
            poller = await self._client.virtual_machine_scale_sets.begin_delete_instances(
                self._settings.resource_group, self._settings.scale_set, body, force_deletion=True
            )
        except HttpResponseError as error:
            if error.status_code in (404, 400) and len(names) > 1:
                # One of them is gone already; which one, Azure does not say.
                for name in names:
                    await self._delete_batch([name])
                return
            if error.status_code in (404, 400):
                return
            raise
        self._deleting.update(names)
        task = asyncio.ensure_future(poller.result())
        self._under_way.add(task)
        task.add_done_callback(lambda task: self._deleted(task, names))

    def _deleted(self, task: asyncio.Task[Any], names: Iterable[str]) -> None:
        self._under_way.discard(task)
        self._deleting.difference_update(names)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The fleet controller sees them listed, and gives them back again.
            self._log.warning("VMs could not be deleted", vms=[*names], error=str(error).splitlines()[0])

    async def close(self, *, end_vms: bool = False) -> None:
        """Lets go of the connection; the VMs stay."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._client.close()


def _name(vm: VirtualMachine) -> str:
    assert vm.name is not None
    return vm.name


def _short(request: str) -> str:
    """The part of a request's tag that goes into names, which take 64 characters and few signs."""
    return re.sub(r"[^a-z0-9]", "", request.lower())[:16]


def _key(place: Place) -> tuple[str, str | None]:
    return place[0].name, place[1]


def _worst(refusals: Sequence[Refusal]) -> Refusal | None:
    """The one that decides when to ask again: being throttled, then errors, the quota, the market."""
    order = (RefusalKind.THROTTLED, RefusalKind.FAILED, RefusalKind.QUOTA, RefusalKind.CAPACITY)
    return min(refusals, key=lambda refusal: order.index(refusal.kind), default=None)
