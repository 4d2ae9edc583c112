"""Spot VMs of Google Cloud's Compute Engine, made one by one.

One by one, because a VM's name then identifies its request, so that repeating a request makes no VM twice, and because
each VM starts with a join token of its own. See Google's pages "Spot VMs", "Method: instances.insert" and
"Troubleshooting resource availability errors".
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import structlog
from google.api_core.exceptions import ClientError, Conflict, GoogleAPIError, NotFound
from google.auth.exceptions import GoogleAuthError
from google.cloud import compute_v1

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.base import (
    CreatedVms,
    ProviderNotice,
    ProviderRefusedError,
    ProviderVm,
    UnknownVmError,
    UnsupportedByProviderError,
    VmOffer,
)
from varuna_manager.providers.blocking_calls import BlockingCalls
from varuna_manager.providers.gce_requests import (
    FLEET_LABEL,
    REQUEST_LABEL,
    make_insert_request,
    parse_error,
    parse_operation_errors,
)
from varuna_manager.providers.gce_settings import GceSettings
from varuna_manager.providers.places import Places

__all__ = ["GceClients", "GceProvider", "make_gce_clients"]

_AT_ONCE = 4
"""Most VMs that are made at the same time, each in a thread for up to a minute."""
_ALIVE = frozenset({"PROVISIONING", "STAGING", "RUNNING", "REPAIRING"})
_STOPPING = frozenset({"PENDING_STOP", "STOPPING"})
"""The guest may still run: a VM that Google preempts has some 30 s in this state."""
_STOPPED = frozenset({"TERMINATED", "STOPPED", "SUSPENDED"})
"""Nothing runs there: its host has failed, say, or its system was shut down. Google keeps it until it is deleted."""
_DELETE_AGAIN_S = 60.0
"""Time after which a stopped VM is deleted again that is still there, because the deletion may have failed."""
_TIMEOUT_S = 30.0
_SETTLE_S = 45.0
"""How long `create` waits for an allocation; what is undecided then counts as made."""
_GIB = 1 << 30
_GoogleError = (GoogleAPIError, GoogleAuthError, OSError)
"""What the client raises; OSError is the base of the errors of its HTTP library."""
_Place = tuple[str, str]
"""Machine type and zone."""

BootScript = Callable[[str], Awaitable[str]]
"""Makes the cloud-init document for the VM of this name; it contains the VM's join token."""


@dataclass(frozen=True)
class GceClients:
    instances: compute_v1.InstancesClient
    operations: compute_v1.ZoneOperationsClient


def make_gce_clients() -> GceClients:
    """Clients with the manager VM's service account, or other credentials that Google's library finds. Raises
    ValueError."""
    try:
        return GceClients(compute_v1.InstancesClient(), compute_v1.ZoneOperationsClient())
    except GoogleAuthError as error:
        raise ValueError(f"Google Cloud: {str(error).splitlines()[0]}") from error


class GceProvider:
    """See the module's docstring. `close` closes `clients`."""

    name = "gce"
    is_elastic = True

    def __init__(
        self,
        settings: GceSettings,
        clients: GceClients,
        boot_script: BootScript,
        *,
        needs_prices: bool = False,
        settle_s: float = _SETTLE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`needs_prices`: the cost of the fleet is limited, so make no VM without a known price."""
        self._settings = settings
        self._clients = clients
        self._boot_script = boot_script
        self._needs_prices = needs_prices
        self._settle_s = settle_s
        self._now = now
        places = [(machine_type, zone) for machine_type in settings.machine_types for zone in settings.zones]
        self._places: Places[_Place] = Places(places, now)
        self._listed: Sequence[ProviderVm] = ()
        self._list_again_at = -float("inf")
        self._listing = asyncio.Lock()
        """Held while VMs are listed, so that no answer is replaced by an older one that arrives later."""
        self._deleted: dict[str, float] = {}
        """Names of VMs that this manager has deleted and that are not gone yet, and when Google accepted that last."""
        self._calls = BlockingCalls(self.name, _AT_ONCE)
        self._log = structlog.get_logger("varuna.gce").bind(fleet=settings.fleet)

    # ------------------------------------------------------------ listing

    async def list(self) -> Sequence[ProviderVm]:
        """The VMs as of a few seconds ago (`list_every_s`), because Google limits these calls. Raises
        ProviderRefusedError."""
        try:
            await self._refresh_list(only_if_due=True)
        except _GoogleError as error:
            raise ProviderRefusedError(parse_error(error).reason) from error
        return self._listed

    async def list_notices(self) -> Sequence[ProviderNotice]:
        """None: each VM's agent polls Google's metadata service for notices."""
        return ()

    async def get_offer(self) -> VmOffer:
        return VmOffer(
            gpus=self._settings.gpus,
            price_per_hour=self._settings.price_per_hour,
            device_memory_bytes=self._memory_bytes,
            gpu_type=self._settings.gpu_type,
        )

    @property
    def _memory_bytes(self) -> int | None:
        memory_gib = self._settings.device_memory_gib
        return None if memory_gib is None else int(memory_gib * _GIB)

    async def _refresh_list(self, *, only_if_due: bool = False) -> None:
        async with self._listing:
            if only_if_due and self._now() < self._list_again_at:
                return
            instances = await self._calls.call(self._fetch_instances)
            self._list_again_at = self._now() + self._settings.list_every_s
            names = {instance.name for _, instance in instances}
            self._deleted = {name: at for name, at in self._deleted.items() if name in names}
            await self._delete_stopped(instances)
            self._listed = [self._make_vm(zone, instance) for zone, instance in instances]

    async def _delete_stopped(self, instances: Sequence[tuple[str, compute_v1.Instance]]) -> None:
        """Delete those that have stopped by themselves, because nobody else does, and their disks are paid for."""
        before = self._now() - _DELETE_AGAIN_S
        stopped = [(instance.name, zone) for zone, instance in instances if instance.status in _STOPPED]
        stopped = [(name, zone) for name, zone in stopped if self._deleted.get(name, before) <= before]
        deletions = (self._delete_one(name, zone) for name, zone in stopped)
        outcomes = await asyncio.gather(*deletions, return_exceptions=True)
        for (name, _), outcome in zip(stopped, outcomes, strict=True):
            if isinstance(outcome, _GoogleError):
                # The listing is valid all the same. The next one tries again.
                self._log.warning("a stopped VM could not be deleted", vm=name, error=parse_error(outcome).reason)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _fetch_instances(self) -> Sequence[tuple[str, compute_v1.Instance]]:
        """The instances of this fleet with their zones. Blocks."""
        request = compute_v1.AggregatedListInstancesRequest(
            project=self._settings.project, filter=f'labels.{FLEET_LABEL}="{self._settings.fleet}"'
        )
        # The next look asks again. The client's own retries take up to ten minutes.
        found = self._clients.instances.aggregated_list(request, retry=None, timeout=_TIMEOUT_S)
        return [(place.removeprefix("zones/"), instance) for place, scoped in found for instance in scoped.instances]

    def _make_vm(self, zone: str, instance: compute_v1.Instance) -> ProviderVm:
        return ProviderVm(
            id=instance.name,
            gpus=self._settings.gpus,
            device_memory_bytes=self._memory_bytes,
            host="",  # its agent reports it
            created_at=datetime.fromisoformat(instance.creation_timestamp).timestamp(),
            ref={"zone": zone, "type": instance.machine_type.rpartition("/")[2]},
            zone=zone,
            machine_type=instance.machine_type.rpartition("/")[2],
            request=instance.labels.get(REQUEST_LABEL),
            price_per_hour=self._settings.price_per_hour,
            going=instance.status not in (_ALIVE if instance.name in self._deleted else _ALIVE | _STOPPING),
        )

    # ------------------------------------------------------------ creation

    async def create(self, count: int, request: str) -> CreatedVms:
        """Make VMs of the first machine types and zones that grant them."""
        if self._needs_prices and self._settings.price_per_hour is None:
            text = "Google gives no spot prices, and the cost of the fleet is limited"
            reason = f"{text}: give price_per_hour in the settings"
            return CreatedVms(refusal=Refusal(kind=RefusalKind.FAILED, reason=reason))
        try:
            await self._refresh_list()
            missing, refusal = self._find_missing(count, request), None
            for place in self._places.list_open():
                if not missing:
                    break
                missing, refusal = await self._create_at(place, missing, request, refusal)
                if refusal is not None and refusal.kind is RefusalKind.THROTTLED:
                    break
            if missing and refusal is None:
                refusal = self._places.make_refusal()
            await self._refresh_list()
        except _GoogleError as error:
            # Google may have made what was asked for: no other place gets its name, and the next list shows it.
            self._list_again_at = -float("inf")
            return CreatedVms(refusal=parse_error(error))
        made = tuple(vm for vm in self._listed if vm.request == request and not vm.going)
        return CreatedVms(vms=made, refusal=refusal if missing else None)

    def _find_missing(self, count: int, request: str) -> Sequence[str]:
        """Names of the VMs that the request lacks, the same each time. VMs that are going keep theirs."""
        of_request = [vm for vm in self._listed if vm.request == request]
        alive = sum(not vm.going for vm in of_request)
        there = {vm.id for vm in of_request}
        short = re.sub(r"[^a-z0-9]", "", request.lower())[:16]
        names = (f"{self._settings.fleet}-{short}-{number:03d}" for number in range(count + len(there)))
        return [name for name in names if name not in there][: max(count - alive, 0)]

    async def _create_at(
        self, place: _Place, names: Sequence[str], request: str, before: Refusal | None
    ) -> tuple[Sequence[str], Refusal | None]:
        """Try to make these VMs at a place; returns the names that could not be made, and why. Raises _GoogleError if
        it is not known what became of one."""
        if self._places.is_doubtful(place) and len(names) > 1:
            left, refusal = await self._create_at(place, names[:1], request, before)
            if left:
                return names, refusal
            names = names[1:]
        gate = asyncio.Semaphore(_AT_ONCE)
        creations = (self._create_one(gate, place, name, request) for name in names)
        outcomes = await asyncio.gather(*creations, return_exceptions=True)
        for outcome in outcomes:  # all have ended: none goes on when one has failed
            if isinstance(outcome, BaseException):
                raise outcome
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
        if not refusals:
            self._places.note_made(place)
        left = [name for name, outcome in zip(names, outcomes, strict=True) if isinstance(outcome, Refusal)]
        return left, _find_worst(refusals) or before

    async def _create_one(self, gate: asyncio.Semaphore, place: _Place, name: str, request: str) -> Refusal | None:
        """Why the VM was not made; None: it was, or it is not decided yet. Raises as `_insert`."""
        async with gate:
            insert = make_insert_request(self._settings, name, place, request, await self._boot_script(name))
            refusal = await self._calls.call(self._insert, insert)
        if refusal is not None:
            self._log.info("Google made no VM", vm=name, place=place, reason=refusal.reason)
            self._places.note_refused(place, refusal)
        return refusal

    def _insert(self, insert: compute_v1.InsertInstanceRequest) -> Refusal | None:
        """Blocks until Google has made the VM, refused it, or takes long. Raises _GoogleError if it is not known
        whether Google makes it."""
        try:
            operation = self._clients.instances.insert_unary(insert, timeout=_TIMEOUT_S)
        except Conflict:
            return None  # an earlier request made it
        except ClientError as error:
            return parse_error(error)
        give_up = time.monotonic() + self._settle_s
        while operation.status != compute_v1.Operation.Status.DONE and time.monotonic() < give_up:
            try:
                operation = self._clients.operations.wait(
                    project=insert.project,
                    zone=insert.zone,
                    operation=operation.name,
                    timeout=self._settle_s + _TIMEOUT_S,
                )
            except _GoogleError:
                if time.monotonic() < give_up:
                    raise
                return None  # Google holds a wait for longer than the timeout
        return parse_operation_errors(operation.error.errors) if operation.error.errors else None

    # ------------------------------------------------------------ deletion

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Returns once Google has accepted the deletions. Raises ProviderRefusedError."""
        if not vm_ids:
            return
        try:
            await self._refresh_list()
            wanted = set(vm_ids)
            deletions = [
                self._delete_one(vm.id, vm.ref["zone"]) for vm in self._listed if vm.id in wanted and not vm.going
            ]
            outcomes = await asyncio.gather(*deletions, return_exceptions=True)
        except _GoogleError as error:
            raise ProviderRefusedError(parse_error(error).reason) from error
        finally:
            self._list_again_at = -float("inf")
        for outcome in outcomes:
            if isinstance(outcome, _GoogleError):
                raise ProviderRefusedError(parse_error(outcome).reason) from outcome
            if isinstance(outcome, BaseException):
                raise outcome

    async def _delete_one(self, name: str, zone: str) -> None:
        await self._calls.call(self._request_deletion, name, zone)
        self._deleted[name] = self._now()

    def _request_deletion(self, name: str, zone: str) -> None:
        """Blocks."""
        try:
            self._clients.instances.delete_unary(
                project=self._settings.project, zone=zone, instance=name, timeout=_TIMEOUT_S
            )
        except NotFound:
            return

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        """Use Google's simulation of a maintenance event, which preempts a spot VM with a notice of 30 s."""
        if notice_s:
            raise UnsupportedByProviderError("Google gives a notice of its own, of up to 30 s: leave notice_s out")
        zones: Mapping[str, str] = {vm.id: vm.ref["zone"] for vm in await self.list() if not vm.going}
        if vm_id not in zones:
            raise UnknownVmError(f"Google has no VM {vm_id!r} in the fleet {self._settings.fleet}")
        try:
            await self._calls.call(self._simulate_event, vm_id, zones[vm_id])
        except _GoogleError as error:
            raise ProviderRefusedError(parse_error(error).reason) from error

    def _simulate_event(self, name: str, zone: str) -> None:
        self._clients.instances.simulate_maintenance_event_unary(
            project=self._settings.project, zone=zone, instance=name, timeout=_TIMEOUT_S
        )

    async def close(self, *, end_vms: bool) -> None:
        """Close the connections after the calls under way, because a call in a thread goes on. The VMs stay, whatever
        `end_vms` is."""
        await self._calls.close()
        self._clients.instances.transport.close()  # type: ignore[no-untyped-call] # Google has no types for it
        self._clients.operations.transport.close()  # type: ignore[no-untyped-call]


def _find_worst(refusals: Sequence[Refusal]) -> Refusal | None:
    """The refusal that decides when to try again: throttling, then errors, quota, capacity."""
    order = (RefusalKind.THROTTLED, RefusalKind.FAILED, RefusalKind.QUOTA, RefusalKind.CAPACITY)
    return min(refusals, key=lambda refusal: order.index(refusal.kind), default=None)
