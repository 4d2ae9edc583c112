"""Bare pods as VMs: one pod for each, made from the user's template in the first pool of nodes that has room.

Bare, because a controller such as a Job would make another pod in the place of one that is lost, and it is the fleet
controller that decides that. A pod's name has the tag of its request and an index, so that no request makes a pod
twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog

from varuna_manager.domain.fleet_decision import Refusal, RefusalKind
from varuna_manager.providers.base import (
    CreatedVms,
    ProviderNotice,
    ProviderRefusedError,
    ProviderVm,
    UnknownVmError,
    VmOffer,
)
from varuna_manager.providers.kind import Origin
from varuna_manager.providers.kubernetes.api import ApiAwayError, ApiRefusedError, KubernetesApi, Object
from varuna_manager.providers.kubernetes.housekeeping import Housekeeping, try_all
from varuna_manager.providers.kubernetes.manager_objects import ManagerObjects, OwnerError
from varuna_manager.providers.kubernetes.nodes import NodeNotices
from varuna_manager.providers.kubernetes.pod_body import (
    FLEET_LABEL,
    POOL_LABEL,
    REQUEST_LABEL,
    Owner,
    make_pod_body,
    make_pod_name,
)
from varuna_manager.providers.kubernetes.pod_cache import PodCache
from varuna_manager.providers.kubernetes.pod_states import (
    PodState,
    describe_disappearance,
    find_condition,
    find_deadline,
    parse_time,
)
from varuna_manager.providers.kubernetes.pools import NodePools
from varuna_manager.providers.kubernetes.settings import KubernetesPool, KubernetesSettings

__all__ = ["KubernetesProvider"]

_AT_ONCE = 16
_DELETION_GRACE_S = 10
"""For pods that are given back: nothing that counts runs there."""
_OVERDUE_S = 30.0
"""A pod that is still there so long after its deadline is on a node that is lost."""
_ENDED_S = 120.0
"""How long a pod that has disappeared stays in the list, with the reason."""
_GIB = 1 << 30


class KubernetesProvider:
    """See the module's docstring. `close` closes `api`."""

    name = "kubernetes"
    is_elastic = True

    def __init__(
        self,
        settings: KubernetesSettings,
        api: KubernetesApi,
        origin: Origin,
        join_token: Callable[[str], Awaitable[str]],
        *,
        needs_prices: bool = False,
        unix_now: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
        pod_name: str | None = None,
    ) -> None:
        """`needs_prices`: the cost of the fleet is limited, so use no pool without a price."""
        self._settings = settings
        self._api = api
        self._origin = origin
        self._unix_now = unix_now
        self._needs_prices = needs_prices
        self._pools_by_name = {pool.name: pool for pool in settings.pools}
        self._pools = NodePools(settings.pools, needs_prices=needs_prices, now=now)
        self._cache = PodCache(api, {FLEET_LABEL: settings.fleet}, self._note_gone)
        self._nodes = NodeNotices(api, settings.node_notices, unix_now)
        self._manager_objects = ManagerObjects(api, settings, pod_name=pod_name)
        self._given_up: set[str] = set()
        """Names of pods that this manager has deleted and that are not gone yet."""
        self._ended: dict[str, tuple[ProviderVm, float]] = {}
        """Pods that disappeared by themselves, and when."""
        self._fallen_out: dict[str, str] = {}
        """Pods that do not come up and were deleted for it, with the reason."""
        self._next_index: dict[str, int] = {}
        """By request: names of pods that are gone are not used again."""
        self._house = Housekeeping(settings, api, join_token, self._pools, unix_now)
        self._housekeeping: asyncio.Task[None] | None = None
        self._troubles: Sequence[str] = ()
        """Errors of the last round of housekeeping."""
        self._log = structlog.get_logger("varuna.kubernetes").bind(fleet=settings.fleet)

    # ------------------------------------------------------------ listing

    async def list(self) -> Sequence[ProviderVm]:
        """Reads what the watch has brought, or asks the API server if there is none."""
        await self._cache.refresh()
        self._keep_house()
        now = self._unix_now()
        self._ended = {name: (vm, at) for name, (vm, at) in self._ended.items() if now < at + _ENDED_S}
        there = [self._make_vm(pod) for pod in self._cache.pods.values()]
        return [*there, *(vm for name, (vm, _) in self._ended.items() if name not in self._cache.pods)]

    async def list_notices(self) -> Sequence[ProviderNotice]:
        """Deletions, disruptions and ends of nodes that Kubernetes has announced. A pod has one notice: its uid."""
        await self._cache.refresh()
        notices = []
        for name, pod in self._cache.pods.items():
            deadline = self._find_deadline(pod)
            if deadline is not None and name not in self._given_up:
                notices.append(ProviderNotice(id=pod["metadata"]["uid"], vm_id=name, deadline_unix_s=deadline))
        return notices

    async def get_offer(self) -> VmOffer:
        """A pod of the first pool that may have room. If the cost of the fleet is limited, the price is that of the
        most expensive pool, because a request may get any."""
        pool = self._pools.find_open() or self._settings.pools[0]
        return VmOffer(
            gpus=pool.gpus,
            price_per_hour=self._pools.find_highest_price() if self._needs_prices else pool.price_per_hour,
            hazard_per_hour=pool.hazard_per_hour,
            device_memory_bytes=_memory_bytes(pool),
            gpu_type=pool.gpu_type,
        )

    def _find_deadline(self, pod: Object) -> float | None:
        if self._find_end(pod) is not None or not pod["spec"].get("nodeName"):
            return None
        announced = find_deadline(pod)
        if announced is not None:
            return announced
        notice = self._nodes.find_notice(pod["spec"]["nodeName"])
        return None if notice is None else notice.deadline_unix_s

    def _find_end(self, pod: Object) -> str | None:
        """Why nothing runs in the pod now or later; None: something runs, or may soon."""
        reason = self._fallen_out.get(pod["metadata"]["name"])
        if reason is not None:
            return reason
        condition = find_condition(pod)
        if condition.state is PodState.ENDED:
            return condition.reason
        node = (pod.get("spec") or {}).get("nodeName")
        if node and self._nodes.is_gone(node):
            return f"its node {node} is gone"
        deletion = pod["metadata"].get("deletionTimestamp")
        if deletion is not None and node and self._unix_now() >= parse_time(deletion) + _OVERDUE_S:
            return f"its node {node} is lost: the pod was to end and nobody there confirms it"
        return None

    def _make_vm(self, pod: Object) -> ProviderVm:
        metadata = pod["metadata"]
        name, labels = metadata["name"], metadata.get("labels") or {}
        pool = self._pools_by_name.get(labels.get(POOL_LABEL, ""))
        condition = find_condition(pod)
        waits = condition.state is not PodState.THERE
        end = self._find_end(pod)
        return ProviderVm(
            id=name,
            gpus=pool.gpus if pool else 1,
            device_memory_bytes=_memory_bytes(pool) if pool else None,
            host="",  # its agent reports it
            created_at=parse_time(metadata.get("creationTimestamp")),
            ref={"uid": metadata["uid"], "namespace": self._api.namespace, "pool": labels.get(POOL_LABEL)},
            request=labels.get(REQUEST_LABEL),
            price_per_hour=pool.price_per_hour if pool else None,
            reason_before_hello=f"its pod waits: {condition.reason}" if waits else condition.reason,
            going=end is None and name in self._given_up,
            ended=end,
        )

    def _note_gone(self, pod: Object) -> None:
        """A pod that was not given back stays in the list for a while, with the reason why it ended."""
        name, request = pod["metadata"]["name"], _request_of(pod)
        number = name.rpartition("-")[2]
        if number.isdigit():
            self._next_index[request] = max(self._next_index.get(request, 0), int(number) + 1)
        self._house.forget_pod(name)
        if name not in self._given_up:
            reason = self._find_end(pod) or describe_disappearance(pod)
            self._ended[name] = (replace(self._make_vm(pod), ended=reason, going=False), self._unix_now())
        self._given_up.discard(name)
        self._fallen_out.pop(name, None)

    # ------------------------------------------------------------ housekeeping

    def _keep_house(self) -> None:
        """Begin a round of what has to be done beside the manager's calls, unless one is under way."""
        if self._housekeeping is None or self._housekeeping.done():
            self._housekeeping = asyncio.create_task(self._keep_house_once())

    async def _keep_house_once(self) -> None:
        """Each chore is done also when another one fails. The next round does again what failed."""
        chores = (
            self._manager_objects.label_leader,
            self._give_tokens,
            self._give_up_overdue,
            self._remove_ended,
            self._look_at_nodes,
        )
        troubles = []
        for chore in chores:
            try:
                await chore()
            except Exception as error:
                is_ours = not isinstance(error, ApiRefusedError | ApiAwayError)
                if str(error) not in self._troubles:
                    self._log.warning("housekeeping failed, and is tried again", error=str(error), exc_info=is_ours)
                troubles.append(str(error))
        self._troubles = troubles

    async def _give_tokens(self) -> None:
        await self._house.give_tokens(self._list_living())

    async def _give_up_overdue(self) -> None:
        await try_all(self._delete_fallen_out, self._house.find_overdue(self._list_living()))

    async def _remove_ended(self) -> None:
        ended = [pod for pod in self._cache.pods.values() if self._find_end(pod) is not None]
        names = [pod["metadata"]["name"] for pod in self._house.find_removable(ended)]
        await try_all(partial(self._delete_one, grace_s=0), names)

    async def _look_at_nodes(self) -> None:
        """Those of all pods whose own status does not say that they have ended: nodes that are gone stay gone."""
        pods = [pod for pod in self._cache.pods.values() if find_condition(pod).state is not PodState.ENDED]
        await self._nodes.refresh({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")})

    async def _delete_fallen_out(self, overdue: tuple[Object, Refusal]) -> None:
        """Delete a pod that does not come up. It is listed as ended, with the reason."""
        pod, refusal = overdue
        name, reason = pod["metadata"]["name"], refusal.reason
        self._log.info("a pod is deleted that does not come up", vm=name, reason=reason)
        self._fallen_out[name] = reason
        try:
            await self._delete_one(name, _DELETION_GRACE_S)
        except (ApiRefusedError, ApiAwayError):
            del self._fallen_out[name]
            raise

    # ------------------------------------------------------------ creation

    async def create(self, count: int, request: str) -> CreatedVms:
        """Make pods in the first open pool. They may have to wait for a node: see `Housekeeping.find_overdue`."""
        async with self._cache.lock:
            try:
                await self._cache.list_again()
                owner = await self._manager_objects.find_owner()
                refusal = await self._create_missing(count, request, owner)
            except OwnerError as error:
                refusal = Refusal(kind=RefusalKind.FAILED, reason=str(error))
            except (ApiRefusedError, ApiAwayError) as error:
                refusal = _make_refusal(error)
        made = tuple(map(self._make_vm, self._find_living(request)))
        return CreatedVms(vms=made, refusal=refusal if len(made) < count else None)

    def _is_living(self, pod: Object) -> bool:
        return pod["metadata"]["name"] not in self._given_up and self._find_end(pod) is None

    def _list_living(self) -> Sequence[Object]:
        return [pod for pod in self._cache.pods.values() if self._is_living(pod)]

    def _find_living(self, request: str) -> Sequence[Object]:
        return [pod for pod in self._list_living() if _request_of(pod) == request]

    async def _create_missing(self, count: int, request: str, owner: Owner | None) -> Refusal | None:
        missing = count - len(self._find_living(request))
        if missing <= 0:
            return None
        pool = self._pools.find_open()
        if pool is None:
            return self._pools.make_refusal()
        gate = asyncio.Semaphore(_AT_ONCE)

        async def create_one(name: str) -> Refusal | None:
            async with gate:
                return await self._create_one(pool, name, request, owner)

        outcomes = await asyncio.gather(*map(create_one, self._choose_names(missing, request)))
        refusals = [refusal for refusal in outcomes if refusal is not None]
        return min(refusals, key=lambda refusal: _SEVERITY.index(refusal.kind), default=None)

    def _choose_names(self, count: int, request: str) -> Sequence[str]:
        """The first names of the request that no pod has or has had."""
        names: list[str] = []
        index = self._next_index.get(request, 0)
        while len(names) < count:
            name = make_pod_name(self._settings.fleet, request, index)
            names += [] if name in self._cache.pods else [name]
            index += 1
        return names

    async def _create_one(self, pool: KubernetesPool, name: str, request: str, owner: Owner | None) -> Refusal | None:
        """Why the pod was not made; None: it was, by this call or by an earlier one."""
        body = make_pod_body(self._settings, pool, name, request, self._origin, owner)
        try:
            try:
                pod = await self._api.create_pod(body)
            except ApiRefusedError as error:
                if error.reason != "AlreadyExists":
                    raise
                pod = await self._api.get_pod(name)
        except (ApiRefusedError, ApiAwayError) as error:
            refusal = _make_refusal(error)
            self._log.info("the API server made no pod", vm=name, pool=pool.name, reason=refusal.reason)
            if isinstance(error, ApiRefusedError) and refusal.kind is not RefusalKind.THROTTLED:
                self._pools.note_refused(pool.name, refusal)
            return refusal
        self._cache.add_pod(pod)
        return None

    # ------------------------------------------------------------ deletion

    async def delete(self, vm_ids: Sequence[str]) -> None:
        """Returns once the API server has accepted the deletions. Raises ApiRefusedError, ApiAwayError after all pods
        were tried."""
        await self._cache.refresh()
        for name in vm_ids:
            self._ended.pop(name, None)
        ours = [name for name in vm_ids if name in self._cache.pods]

        async def delete_one(name: str) -> None:
            self._given_up.add(name)
            try:
                await self._delete_one(name, _DELETION_GRACE_S)
            except BaseException:  # also when the manager ends: whether it is deleted is not known
                self._given_up.discard(name)
                raise

        await try_all(delete_one, ours)

    async def _delete_one(self, name: str, grace_s: int) -> None:
        """Ignores a pod that is gone."""
        try:
            await self._api.delete_pod(name, grace_s)
        except ApiRefusedError as error:
            if error.code != 404:
                raise

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        """Delete the pod as others do: with the notice as its grace period."""
        try:
            await self._cache.refresh()
            if vm_id not in self._cache.pods:
                raise UnknownVmError(f"namespace {self._api.namespace} has no pod {vm_id!r} of this fleet")
            await self._api.delete_pod(vm_id, math.ceil(notice_s))
        except (ApiRefusedError, ApiAwayError) as error:
            raise ProviderRefusedError(str(error)) from error

    async def close(self, *, end_vms: bool) -> None:
        """Close the connection. The pods stay, whatever `end_vms` is: they are not processes of this machine."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self._cache.close()
        await self._api.close()


_SEVERITY = (RefusalKind.THROTTLED, RefusalKind.FAILED, RefusalKind.QUOTA, RefusalKind.CAPACITY)


def _make_refusal(error: ApiRefusedError | ApiAwayError) -> Refusal:
    if isinstance(error, ApiRefusedError):
        if error.code == 429:
            return Refusal(kind=RefusalKind.THROTTLED, reason=str(error), retry_after_s=error.retry_after_s)
        if error.code == 403 and "exceeded quota" in str(error):
            return Refusal(kind=RefusalKind.QUOTA, reason=str(error))
    return Refusal(kind=RefusalKind.FAILED, reason=str(error))


def _request_of(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(REQUEST_LABEL, ""))


def _memory_bytes(pool: KubernetesPool) -> int | None:
    return None if pool.device_memory_gib is None else int(pool.device_memory_gib * _GIB)
