"""Spot instances of AWS: an instant fleet for each VM, over all instance types and subnets of the settings.

One fleet each, because every VM starts with a join token of its own in its user data. AWS chooses among the types and
subnets by price and free capacity. A VM's name identifies its request, so that repeating a request makes no VM twice;
the client token protects from a repetition before AWS lists the instance. See AWS's pages "Create an EC2 Fleet of type
instant", "Ensuring idempotency in Amazon EC2 API requests" and "Request throttling for the Amazon EC2 API".
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import boto3
import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

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
from varuna_manager.providers.ec2_market import fetch_spot_prices, parse_error, parse_fleet_errors
from varuna_manager.providers.ec2_requests import (
    FLEET_TAG,
    REQUEST_TAG,
    make_fleet_request,
    make_template_data,
    name_template,
)
from varuna_manager.providers.ec2_settings import Ec2Settings

__all__ = ["Ec2Provider", "make_ec2_client"]

_AT_ONCE = 8
"""Most requests for VMs at the same time."""
_MARKET_S = 300.0
"""Time between two queries of prices."""
_UNLISTED_S = 120.0
"""How long AWS may take to list an instance that it has made."""
_STATES = ("pending", "running", "shutting-down", "stopping", "stopped")
_ALIVE = ("pending", "running")
_GIB = 1 << 30
_AwsError = (BotoCoreError, ClientError)

BootScript = Callable[[str], Awaitable[str]]
"""Makes the cloud-init document for the VM of this name; it contains the VM's join token."""


def make_ec2_client(settings: Ec2Settings) -> Any:
    """A client with the manager's own role, or other credentials that boto3 finds."""
    config = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 3})
    return boto3.client("ec2", region_name=settings.region, config=config)


class Ec2Provider:
    """See the module's docstring. `close` closes `client`."""

    name = "ec2"
    is_elastic = True

    def __init__(
        self,
        settings: Ec2Settings,
        client: Any,
        boot_script: BootScript,
        *,
        needs_prices: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`needs_prices`: the cost of the fleet is limited, so make no VM without a known price."""
        self._settings = settings
        self._client = client
        self._boot_script = boot_script
        self._needs_prices = needs_prices
        self._now = now
        self._has_template = False
        self._attempts: Counter[str] = Counter()
        """By the name of a VM that is missing, how many requests for it were refused."""
        self._was_refused = False
        """Whether AWS refused the last VM: then one is tried first, because each has a token of its own."""
        self._prices: Mapping[tuple[str, str], float] = {}
        self._price_again_at = -float("inf")
        self._listed: Sequence[ProviderVm] = ()
        self._used_names: frozenset[str] = frozenset()
        """Of all instances that AWS still shows, also of those that ended within the last hour."""
        self._list_again_at = -float("inf")
        self._listing = asyncio.Lock()
        """Held while VMs are listed, so that no answer is replaced by an older one that arrives later."""
        self._unlisted: dict[str, tuple[ProviderVm, float]] = {}
        """Instances that AWS has made and may not list yet, and until when that is no wonder."""
        self._calls = BlockingCalls(self.name, _AT_ONCE)
        self._log = structlog.get_logger("varuna.ec2").bind(fleet=settings.fleet)

    # ------------------------------------------------------------ listing

    async def list(self) -> Sequence[ProviderVm]:
        """The VMs as of a few seconds ago (`list_every_s`), because AWS limits these calls. Raises
        ProviderRefusedError."""
        try:
            await self._refresh_list(only_if_due=True)
        except _AwsError as error:
            raise ProviderRefusedError(parse_error(error).reason) from error
        return self._listed

    async def list_notices(self) -> Sequence[ProviderNotice]:
        """None: each VM's agent polls AWS's metadata service for notices."""
        return ()

    async def get_offer(self) -> VmOffer:
        """If the cost of the fleet is limited, the price is that of the most expensive type and zone, because a request
        may get any."""
        await self._refresh_prices()
        choose = max if self._needs_prices else min
        memory_gib = self._settings.device_memory_gib
        return VmOffer(
            gpus=self._settings.gpus,
            price_per_hour=choose(self._prices.values()) if self._prices else self._settings.price_per_hour,
            device_memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
            gpu_type=self._settings.gpu_type,
        )

    async def _refresh_list(self, *, only_if_due: bool = False) -> None:
        async with self._listing:
            if only_if_due and self._now() < self._list_again_at:
                return
            instances = await self._calls.call(self._fetch_instances)
            await self._refresh_prices()  # so that no VM has the settings' price first and then AWS's
            self._note_listed(instances)
            await self._terminate_stopped(instances)

    def _note_listed(self, instances: Sequence[Mapping[str, Any]]) -> None:
        now = self._now()
        self._list_again_at = now + self._settings.list_every_s
        known = {instance["InstanceId"] for instance in instances}
        self._used_names = frozenset(_name(instance) for instance in instances)
        self._unlisted = {
            instance_id: (vm, until)
            for instance_id, (vm, until) in self._unlisted.items()
            if instance_id not in known and until > now
        }
        there = [self._make_vm(instance) for instance in instances if instance["State"]["Name"] in _STATES]
        self._listed = [*there, *(vm for vm, _ in self._unlisted.values())]

    async def _terminate_stopped(self, instances: Sequence[Mapping[str, Any]]) -> None:
        """Terminate those that have stopped by themselves, because nobody else does, and their disks are paid for."""
        ids = [instance["InstanceId"] for instance in instances if instance["State"]["Name"] == "stopped"]
        if not ids:
            return
        try:
            await self._calls.call(self._client.terminate_instances, InstanceIds=ids)
        except _AwsError as error:
            # The listing is valid all the same. The next one tries again.
            self._log.warning("stopped VMs could not be terminated", ids=ids, error=parse_error(error).reason)

    def _fetch_instances(self) -> Sequence[Mapping[str, Any]]:
        """The instances of this fleet, in any state. Blocks."""
        filters = [{"Name": f"tag:{FLEET_TAG}", "Values": [self._settings.fleet]}]
        pages = self._client.get_paginator("describe_instances").paginate(Filters=filters)
        return [
            instance for page in pages for reservation in page["Reservations"] for instance in reservation["Instances"]
        ]

    def _make_vm(self, instance: Mapping[str, Any]) -> ProviderVm:
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        instance_type, zone = instance["InstanceType"], instance.get("Placement", {}).get("AvailabilityZone", "")
        memory_gib = self._settings.device_memory_gib
        return ProviderVm(
            id=_name(instance),
            gpus=self._settings.gpus,
            device_memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
            host="",  # its agent reports it
            created_at=instance["LaunchTime"].timestamp(),
            ref={"id": instance["InstanceId"], "type": instance_type, "zone": zone},
            zone=zone,
            machine_type=instance_type,
            request=tags.get(REQUEST_TAG),
            price_per_hour=self._prices.get((instance_type, zone), self._settings.price_per_hour),
            going=instance["State"]["Name"] not in _ALIVE,
        )

    async def _refresh_prices(self) -> None:
        if self._now() < self._price_again_at:
            return
        self._price_again_at = self._now() + _MARKET_S
        try:
            self._prices = {**self._prices, **await self._calls.call(fetch_spot_prices, self._client, self._settings)}
        except _AwsError as error:
            self._log.info("AWS gives no spot prices", error=parse_error(error).reason)

    # ------------------------------------------------------------ creation

    async def create(self, count: int, request: str) -> CreatedVms:
        """Make VMs, each of the type and in the subnet that AWS chooses."""
        if self._needs_prices and (await self.get_offer()).price_per_hour is None:
            text = "AWS gives no spot prices, and the cost of the fleet is limited"
            reason = f"{text}: give price_per_hour in the settings"
            return CreatedVms(refusal=Refusal(kind=RefusalKind.FAILED, reason=reason))
        try:
            await self._ensure_template()
            await self._refresh_list()
            missing = self._find_missing(count, request)
            self._attempts = Counter({name: self._attempts[name] for name in missing if name in self._attempts})
            refusal = await self._create_all(missing, request)
            await self._refresh_list()
        except _AwsError as error:
            return CreatedVms(refusal=parse_error(error))
        made = tuple(vm for vm in self._listed if vm.request == request and not vm.going)
        return CreatedVms(vms=made, refusal=refusal)

    def _find_missing(self, count: int, request: str) -> Sequence[str]:
        """Names of the VMs that the request lacks. No name is used twice, because AWS would answer as it did before."""
        alive = [vm.id for vm in self._listed if vm.request == request and not vm.going]
        used = {*alive, *self._used_names}
        short = re.sub(r"[^a-z0-9]", "", request.lower())[:16]
        names = (f"{self._settings.fleet}-{short}-{number:03d}" for number in range(count + len(used)))
        return [name for name in names if name not in used][: max(count - len(alive), 0)]

    async def _ensure_template(self) -> None:
        if self._has_template:
            return
        name, data = name_template(self._settings), make_template_data(self._settings)
        tags = [{"Key": FLEET_TAG, "Value": self._settings.fleet}]
        try:
            await self._calls.call(
                self._client.create_launch_template,
                LaunchTemplateName=name,
                LaunchTemplateData=data,
                TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
            )
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "InvalidLaunchTemplateName.AlreadyExistsException":
                raise
        self._has_template = True

    async def _create_all(self, names: Sequence[str], request: str) -> Refusal | None:
        """Why some of these VMs were not made; None: all were."""
        if self._was_refused and len(names) > 1:
            refusal = await self._create_all(names[:1], request)
            if refusal is not None:
                return refusal
            names = names[1:]
        gate = asyncio.Semaphore(_AT_ONCE)
        outcomes = await asyncio.gather(*(self._create_one(gate, name, request) for name in names))
        refusal = _find_worst([outcome for outcome in outcomes if outcome is not None])
        if names:
            self._was_refused = refusal is not None
        return refusal

    async def _create_one(self, gate: asyncio.Semaphore, name: str, request: str) -> Refusal | None:
        """Why the VM was not made; None: it was."""
        async with gate:
            script = await self._boot_script(name)
            arguments = make_fleet_request(self._settings, name, request, self._attempts[name], script)
            try:
                answer = await self._calls.call(self._client.create_fleet, **arguments)
            except _AwsError as error:
                refusal = parse_error(error)
                self._log.info("AWS made no VM", vm=name, reason=refusal.reason)
                return refusal
        ids = [instance_id for made in answer.get("Instances", ()) for instance_id in made["InstanceIds"]]
        if not ids:
            self._attempts[name] += 1
            refusal = parse_fleet_errors(answer.get("Errors", ()))
            self._log.info("AWS made no VM", vm=name, reason=refusal.reason)
            return refusal
        memory_gib = self._settings.device_memory_gib
        vm = ProviderVm(
            id=name,
            gpus=self._settings.gpus,
            device_memory_bytes=None if memory_gib is None else int(memory_gib * _GIB),
            host="",
            created_at=time.time(),
            ref={"id": ids[0]},
            request=request,
        )
        self._unlisted[ids[0]] = (vm, self._now() + _UNLISTED_S)
        return None

    # ------------------------------------------------------------ deletion

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Raises ProviderRefusedError."""
        if not vm_ids:
            return
        try:
            await self._refresh_list()
            wanted = set(vm_ids)
            ids = [vm.ref["id"] for vm in self._listed if vm.id in wanted and not vm.going]
            if ids:
                await self._calls.call(self._client.terminate_instances, InstanceIds=ids)
        except _AwsError as error:
            raise ProviderRefusedError(parse_error(error).reason) from error
        for instance_id in ids:
            self._unlisted.pop(instance_id, None)
        self._list_again_at = -float("inf")

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        """Terminate it, as AWS does when it interrupts an instance without notice."""
        if notice_s:
            way_out = "leave notice_s out, or let AWS's Fault Injection Service interrupt the instance"
            raise UnsupportedByProviderError(f"only AWS itself gives notices: {way_out}")
        if vm_id not in {vm.id for vm in await self.list() if not vm.going}:
            raise UnknownVmError(f"AWS has no VM {vm_id!r} in the fleet {self._settings.fleet}")
        await self.delete([vm_id])

    async def close(self, *, end_vms: bool) -> None:
        """Close the connections after the calls under way, because a call in a thread goes on. The VMs stay, whatever
        `end_vms` is."""
        await self._calls.close()
        self._client.close()


def _name(instance: Mapping[str, Any]) -> str:
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
    return str(tags.get("Name", instance["InstanceId"]))


def _find_worst(refusals: Sequence[Refusal]) -> Refusal | None:
    """The refusal that decides when to try again: throttling, then errors, quota, capacity."""
    order = (RefusalKind.THROTTLED, RefusalKind.FAILED, RefusalKind.QUOTA, RefusalKind.CAPACITY)
    return min(refusals, key=lambda refusal: order.index(refusal.kind), default=None)
