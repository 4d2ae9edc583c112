"""Spot VMs of Azure: a Flexible scale set, whose VMs are made one by one.

One by one, because a VM's name then identifies its request, so that repeating a request makes no VM twice, and because
each VM starts with a token of its own. In one scale set, Azure can place them together, and one call can delete many.
See Microsoft's pages "Attach or detach a virtual machine to or from a scale set", "Spot Virtual Machines for scale
sets" and "Throttling limits for Virtual Machines".
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import structlog
from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ResourceExistsError, ResourceNotFoundError
from azure.core.pipeline.policies import AsyncRetryPolicy
from azure.core.polling import AsyncLROPoller
from azure.mgmt.compute.aio import ComputeManagementClient
from azure.mgmt.compute.models import VirtualMachine

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.azure_deletions import Deletions
from varuna_manager.providers.azure_market import (
    Quote,
    fetch_quotes,
    first_line,
    is_acceleration_refusal,
    parse_refusal,
)
from varuna_manager.providers.azure_places import AzurePlace, list_azure_places
from varuna_manager.providers.azure_requests import FLEET_TAG, REQUEST_TAG, make_scale_set_body, make_vm_body
from varuna_manager.providers.azure_retail import fetch_retail_prices
from varuna_manager.providers.azure_settings import AzureSettings, AzureSize
from varuna_manager.providers.azure_states import VmCondition, find_condition
from varuna_manager.providers.base import (
    CreatedVms,
    ProviderNotice,
    ProviderRefusedError,
    ProviderVm,
    UnknownVmError,
    UnsupportedByProviderError,
    VmOffer,
)
from varuna_manager.providers.places import Places

__all__ = ["AzureProvider", "PatientRetryPolicy", "make_azure_client"]

_PAGE = 50
"""Fewest VMs on a page of a listing; each page is a request."""
_AT_ONCE = 32
"""Most creations at the same time."""
_MARKET_S = 600.0
"""Time between two queries of prices and eviction rates."""
_MARKET_AGAIN_S = 60.0
"""The same, after a query that failed."""
_POLL_S = 5.0
"""Time between two polls of an operation, if Azure names none."""
_LONGEST_WAIT_S = 10.0
"""A call does not wait for a longer Retry-After: it becomes a refusal, which the fleet controller waits out."""
_CONNECT_S = 10.0
_READ_S = 30.0
"""Longest time without a byte of an answer. The SDK waits for 300 s, as often as it retries."""
_GIB = 1 << 30

BootScript = Callable[[str, AzureSize], Awaitable[str]]
"""Makes the cloud-init document for a VM of this name and size; it contains the VM's join token."""


class PatientRetryPolicy(AsyncRetryPolicy[Any, Any]):
    """The SDK's policy without long waits, during which a call would sleep."""

    def is_retry(self, settings: dict[str, Any], response: Any) -> bool:
        wait_s = self.get_retry_after(response)
        return (wait_s is None or wait_s <= _LONGEST_WAIT_S) and bool(super().is_retry(settings, response))


def make_azure_client(settings: AzureSettings) -> ComputeManagementClient:
    """A client with the manager VM's identity, or another one that DefaultAzureCredential finds."""
    from azure.identity.aio import DefaultAzureCredential

    return ComputeManagementClient(
        DefaultAzureCredential(),
        settings.subscription_id,
        retry_policy=PatientRetryPolicy(retry_total=4),
        polling_interval=_POLL_S,
        connection_timeout=_CONNECT_S,
        read_timeout=_READ_S,
    )


class AzureProvider:
    """See the module's docstring. `close` closes `client`."""

    name = "azure"
    is_elastic = True

    def __init__(
        self,
        settings: AzureSettings,
        client: ComputeManagementClient,
        boot_script: BootScript,
        *,
        needs_prices: bool = False,
        settle_s: float = 45.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`needs_prices`: the cost of the fleet is limited, so make no VM of a size without a known price.
        `settle_s`: how long `create` waits for allocations; what is still undecided then counts as made."""
        self._settings = settings
        self._client = client
        self._boot_script = boot_script
        self._needs_prices = needs_prices
        self._settle_s = settle_s
        self._now = now
        self._places = Places(list_azure_places(settings.sizes), now)
        self._has_scale_set = False
        self._writes: deque[float] = deque()
        self._quotes: Mapping[str, Quote] = {}
        self._quote_again_at = -float("inf")
        self._unaccelerated: set[str] = set()
        """Sizes for which Azure refused accelerated networking."""
        self._listed: Sequence[ProviderVm] = ()
        self._list_again_at = -float("inf")
        self._listing = asyncio.Lock()
        """Held while VMs are listed, so that no answer is replaced by an older one that arrives later."""
        self._deletions = Deletions(settings, client, now, self._forget_list)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger("varuna.azure").bind(scale_set=settings.scale_set)

    # ------------------------------------------------------------ listing

    async def list(self) -> Sequence[ProviderVm]:
        """The VMs as of a few seconds ago (`list_every_s` for each page), because Azure limits these calls too. Raises
        ProviderRefusedError."""
        try:
            await self._refresh_list(only_if_due=True)
        except AzureError as error:
            raise ProviderRefusedError(parse_refusal(error).reason) from error
        return self._listed

    async def _refresh_list(self, *, only_if_due: bool = False) -> None:
        async with self._listing:
            if only_if_due and self._now() < self._list_again_at:
                return
            vms = await self._fetch_vms()
            await self._refresh_quotes()  # so that no VM has the settings' price first and then Azure's
            await self._note_listed(vms)

    async def _note_listed(self, vms: Sequence[VirtualMachine]) -> None:
        """Take in the listing, and delete VMs that failed."""
        self._list_again_at = self._now() + self._settings.list_every_s * (1 + len(vms) // _PAGE)
        conditions = {_name(vm): find_condition(vm) for vm in vms}
        self._listed = [self._make_vm(vm) for vm in vms if conditions[_name(vm)] is not VmCondition.FAILED]
        failed = [name for name, condition in conditions.items() if condition is VmCondition.FAILED]
        if not failed:
            return
        try:
            await self._deletions.delete_vms(failed)
        except AzureError as error:
            # The listing is valid all the same. The next one tries again.
            self._log.warning("VMs that failed could not be deleted", vms=failed, error=first_line(error))

    def _forget_list(self) -> None:
        """Make the next `list` ask Azure."""
        self._list_again_at = -float("inf")

    async def list_notices(self) -> Sequence[ProviderNotice]:
        """None: each VM's agent polls Azure's metadata service for notices."""
        return ()

    async def get_offer(self) -> VmOffer:
        """The first size that may be available now. If the cost of the fleet is limited, the price is that of the most
        expensive size, because a request may get any size."""
        await self._refresh_quotes()
        place = next(iter(self._priced_places()), None)
        size = self._settings.sizes[0] if place is None else place.size
        price = self._price(size)
        if self._needs_prices:
            prices = [price for size in self._settings.sizes if (price := self._price(size)) is not None]
            price = max(prices, default=None)
        hazard = self._quotes.get(size.name, Quote()).hazard_per_hour
        return VmOffer(
            gpus=size.gpus,
            price_per_hour=price,
            hazard_per_hour=hazard,
            device_memory_bytes=_memory_bytes(size),
            gpu_type=size.gpu_type,
        )

    async def _fetch_vms(self) -> Sequence[VirtualMachine]:
        """The VMs of this fleet, in any state."""
        of_set = f"'virtualMachineScaleSet/id' eq '{self._settings.scale_set_id}'"
        found = self._client.virtual_machines.list(self._settings.resource_group, filter=of_set, expand="instanceView")
        try:
            vms = [vm async for vm in found]
        except ResourceNotFoundError:
            return []  # the scale set does not exist yet
        return [vm for vm in vms if (vm.tags or {}).get(FLEET_TAG) == self._settings.scale_set]

    def _make_vm(self, vm: VirtualMachine) -> ProviderVm:
        size = self._size(vm.hardware_profile.vm_size if vm.hardware_profile else None)
        return ProviderVm(
            id=_name(vm),
            gpus=size.gpus if size else 1,
            device_memory_bytes=_memory_bytes(size) if size else None,
            host="",  # its agent reports it
            created_at=vm.time_created.timestamp() if vm.time_created else time.time(),
            ref={"id": vm.id, "size": size.name if size else None, "zones": [*(vm.zones or ())]},
            zone="-".join([self._settings.location, *(vm.zones or ())]),
            machine_type=size.name if size else "",
            request=(vm.tags or {}).get(REQUEST_TAG),
            price_per_hour=self._price(size) if size else None,
            going=find_condition(vm) is VmCondition.GOING,
        )

    def _size(self, name: str | None) -> AzureSize | None:
        sizes = self._settings.sizes
        return next((size for size in sizes if name and size.name.lower() == name.lower()), None)

    def _price(self, size: AzureSize) -> float | None:
        """Azure's price, else that of the settings, else the highest price that may be paid, as a bound."""
        quoted = self._quotes.get(size.name, Quote()).price_per_hour
        most = self._settings.max_price_per_hour
        return quoted or size.price_per_hour or (most if most > 0 else None)

    async def _refresh_quotes(self) -> None:
        if self._now() < self._quote_again_at:
            return
        self._quote_again_at = self._now() + _MARKET_S
        fresh: Mapping[str, Quote] = {}
        try:
            fresh = await fetch_quotes(self._client, self._settings)
        except (AzureError, KeyError, ValueError) as error:
            self._log.info("Resource Graph gives no prices and eviction rates", error=str(error).splitlines()[0])
        names = [size.name for size in self._settings.sizes]
        unpriced = [name for name in names if fresh.get(name, Quote()).price_per_hour is None]
        # These cost what was last known of them, until there is another price.
        known = {name: self._quotes.get(name, Quote()).price_per_hour for name in unpriced}
        held = {name: replace(quote, price_per_hour=known[name]) for name, quote in fresh.items() if name in known}
        self._quotes = {**self._quotes, **fresh, **held}
        if not unpriced or not self._settings.retail_prices_url:
            return
        try:
            prices = await fetch_retail_prices(self._settings.retail_prices_url, self._settings.location, unpriced)
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            self._quote_again_at = self._now() + _MARKET_AGAIN_S
            text = f"{type(error).__name__}: {error}"
            self._log.warning(
                "the list of retail prices cannot be read", url=self._settings.retail_prices_url, error=text
            )
            return
        quoted = {
            name: replace(self._quotes.get(name, Quote()), price_per_hour=price) for name, price in prices.items()
        }
        self._quotes = {**self._quotes, **quoted}

    # ------------------------------------------------------------ creation

    async def create(self, count: int, request: str) -> CreatedVms:
        """Make VMs at the first sizes and zones that grant them."""
        try:
            unfit = await self._ensure_scale_set()
            if unfit is not None:
                return CreatedVms(refusal=unfit)
            await self._refresh_list()
            missing = wanted = self._find_missing(count, request)
            refusal: Refusal | None = None
            for place in self._priced_places():
                if not missing:
                    break
                missing, refusal = await self._create_at(place, missing, request, refusal)
                if refusal is not None and refusal.kind is RefusalKind.THROTTLED:
                    break
            if missing and refusal is None:
                refusal = self._make_no_place_refusal()
            await self._refresh_list()
        except AzureError as error:
            return CreatedVms(refusal=parse_refusal(error))
        made = tuple(vm for vm in self._listed if vm.request == request and not vm.going)
        return CreatedVms(vms=made, refusal=None if {*wanted} <= {vm.id for vm in made} else refusal)

    def _find_missing(self, count: int, request: str) -> Sequence[str]:
        """Names of the VMs that the request lacks, the same each time. VMs that are being deleted keep theirs."""
        of_request = [vm for vm in self._listed if vm.request == request]
        going = sum(vm.going for vm in of_request)
        names = [f"{self._settings.scale_set}-{_shorten(request)}-{number:03d}" for number in range(count + going)]
        there = {vm.id for vm in of_request}
        return [name for name in names if name not in there][: max(count - len(of_request) + going, 0)]

    async def _ensure_scale_set(self) -> Refusal | None:
        """Why the existing scale set cannot take our VMs; None: it can."""
        if self._has_scale_set:
            return None
        sets = self._client.virtual_machine_scale_sets
        group, name = self._settings.resource_group, self._settings.scale_set
        try:
            found = await sets.get(group, name)
        except ResourceNotFoundError:
            body: Any = make_scale_set_body(self._settings)
            poller = await sets.begin_create_or_update(group, name, body)
            await poller.result()
            self._log.info("the scale set was made")
        else:
            there, wanted = {*(found.zones or ())}, {zone for size in self._settings.sizes for zone in size.zones}
            if not wanted <= there or (there and not wanted):
                # Azure refuses each VM of another zone, and each without a zone in a set with zones.
                text = f"scale set {name} has {_zones_text(there)} and the sizes of the settings {_zones_text(wanted)}"
                way_out = "give the sizes the zones of the set, or use another scale_set"
                return Refusal(kind=RefusalKind.FAILED, reason=f"{text}: {way_out}")
        self._has_scale_set = True
        return None

    def _priced_places(self) -> Sequence[AzurePlace]:
        places = self._places.list_open()
        return [place for place in places if not self._needs_prices or self._price(place.size) is not None]

    def _make_no_place_refusal(self) -> Refusal:
        if self._places.list_open():
            text = "Azure gives no prices for its sizes, and the cost of the fleet is limited"
            way_out = "give each size its price_per_hour in the settings"
            return Refusal(kind=RefusalKind.FAILED, reason=f"{text}: {way_out}")
        return self._places.make_refusal()

    async def _create_at(
        self, place: AzurePlace, names: Sequence[str], request: str, before: Refusal | None
    ) -> tuple[Sequence[str], Refusal | None]:
        """Try to make these VMs at a place; returns the names that could not be made, and why."""
        if self._places.is_doubtful(place) and len(names) > 1:
            left, refusal = await self._create_at(place, names[:1], request, before)
            if left:
                return names, refusal
            names = names[1:]
        granted, retry_after_s = self._reserve_writes(len(names))
        gate = asyncio.Semaphore(_AT_ONCE)
        outcomes = await asyncio.gather(*(self._create_one(gate, place, name, request) for name in names[:granted]))
        refusals = [refusal for refusal in outcomes if refusal is not None]
        if outcomes and not refusals:
            self._places.note_made(place)
        left = [name for name, refusal in zip(names, outcomes, strict=False) if refusal is not None]
        left += names[granted:]
        if granted < len(names):
            text = f"{self._settings.writes_per_minute} requests a minute are used up (writes_per_minute)"
            return left, Refusal(kind=RefusalKind.THROTTLED, reason=text, retry_after_s=retry_after_s)
        return left, _find_worst(refusals) or before

    async def _create_one(self, gate: asyncio.Semaphore, place: AzurePlace, name: str, request: str) -> Refusal | None:
        """Why the VM was not made; None: it was, or it is not decided yet."""
        accelerated = self._is_accelerated(place.size)
        refusal = await self._request_vm(gate, place, name, request)
        if refusal is not None and accelerated and not self._is_accelerated(place.size):
            refusal = await self._request_vm(gate, place, name, request)
        return refusal

    async def _request_vm(self, gate: asyncio.Semaphore, place: AzurePlace, name: str, request: str) -> Refusal | None:
        group = self._settings.resource_group
        async with gate:
            script = await self._boot_script(name, place.size)
            accelerated = self._is_accelerated(place.size)
            body: Any = make_vm_body(self._settings, name, place, request, script, accelerated=accelerated)
            try:
                poller = await self._client.virtual_machines.begin_create_or_update(
                    group, name, body, match_condition=MatchConditions.IfMissing
                )
            except ResourceExistsError as error:
                if error.status_code == 412:
                    return None  # an earlier request made it
                return self._note_refusal(place, name, error)
            except AzureError as error:
                return self._note_refusal(place, name, error)
        return await self._wait_settled(self._wait_allocated(place, name, poller))

    def _is_accelerated(self, size: AzureSize) -> bool:
        """Whether to request accelerated networking: unless the settings or Azure rule it out."""
        explicit = size.accelerated_networking
        return size.name not in self._unaccelerated if explicit is None else explicit

    async def _wait_allocated(self, place: AzurePlace, name: str, poller: AsyncLROPoller[Any]) -> Refusal | None:
        try:
            await poller.result()
        except AzureError as error:
            refusal = self._note_refusal(place, name, error)
            if refusal.kind in (RefusalKind.CAPACITY, RefusalKind.QUOTA) or is_acceleration_refusal(refusal):
                await self._delete_failed(name)
            return refusal  # after any other error the VM may run: the next listing shows whether it does
        return None

    def _note_refusal(self, place: AzurePlace, name: str, error: AzureError) -> Refusal:
        refusal = parse_refusal(error)
        if is_acceleration_refusal(refusal):
            self._unaccelerated.add(place.size.name)
        self._log.info("Azure made no VM", vm=name, place=str(place), reason=refusal.reason)
        self._places.note_refused(place, refusal)
        return refusal

    async def _wait_settled(self, work: Coroutine[Any, Any, Refusal | None]) -> Refusal | None:
        """The outcome of the work, if it ends in time; otherwise it goes on in the background."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        done, _ = await asyncio.wait({task}, timeout=self._settle_s)
        return task.result() if done else None

    async def _delete_failed(self, name: str) -> None:
        """Delete a VM whose allocation failed: as a resource it blocks its name and uses quota."""
        try:
            poller = await self._client.virtual_machines.begin_delete(
                self._settings.resource_group, name, force_deletion=True
            )
            await poller.result()
        except ResourceNotFoundError:
            return
        except AzureError as error:
            # The next listing finds it among the failed VMs and tries again.
            self._log.warning("a VM that failed could not be deleted", vm=name, error=first_line(error))

    def _reserve_writes(self, wanted: int) -> tuple[int, float]:
        """How many of the minute's requests are left for this, and after how many seconds there are more."""
        now = self._now()
        while self._writes and self._writes[0] <= now - 60.0:
            self._writes.popleft()
        granted = min(wanted, self._settings.writes_per_minute - len(self._writes))
        self._writes.extend([now] * granted)
        return granted, self._writes[0] + 60.0 - now if self._writes else 0.0

    # ------------------------------------------------------------ deletion

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Returns once Azure has accepted the deletions, or throttles them: the caller deletes VMs again that are still
        listed. Raises ProviderRefusedError."""
        try:
            await self._deletions.delete_vms(vm_ids)
        except AzureError as error:
            raise ProviderRefusedError(parse_refusal(error).reason) from error

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        """Use Azure's simulation of an eviction, which takes minutes and gives a notice of up to 30 s."""
        if notice_s:
            raise UnsupportedByProviderError("Azure gives a notice of its own, of up to 30 s: leave notice_s out")
        try:
            await self._client.virtual_machines.simulate_eviction(self._settings.resource_group, vm_id)
        except ResourceNotFoundError as error:
            raise UnknownVmError(f"Azure has no VM {vm_id!r} in {self._settings.resource_group}") from error
        except AzureError as error:
            raise ProviderRefusedError(parse_refusal(error).reason) from error

    async def close(self, *, end_vms: bool) -> None:
        """Close the connection. The VMs stay, whatever `end_vms` is, because they are not processes of this machine."""
        await self._deletions.close()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._client.close()


def _name(vm: VirtualMachine) -> str:
    assert vm.name is not None
    return vm.name


def _memory_bytes(size: AzureSize) -> int | None:
    return None if size.device_memory_gib is None else int(size.device_memory_gib * _GIB)


def _zones_text(zones: Iterable[str]) -> str:
    return f"zones {', '.join(sorted(zones))}" if zones else "no zones"


def _shorten(request: str) -> str:
    """The part of a request's tag for names, which have at most 64 characters from a small set."""
    return re.sub(r"[^a-z0-9]", "", request.lower())[:16]


def _find_worst(refusals: Sequence[Refusal]) -> Refusal | None:
    """The refusal that decides when to try again: throttling, then errors, quota, capacity."""
    order = (RefusalKind.THROTTLED, RefusalKind.FAILED, RefusalKind.QUOTA, RefusalKind.CAPACITY)
    return min(refusals, key=lambda refusal: order.index(refusal.kind), default=None)
