"""A provider whose calls are timed and counted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from varuna_manager.domain.pools import PoolTerms
from varuna_manager.providers.base import CreatedVms, PooledProvider, Provider, ProviderNotice, ProviderVm, VmOffer

_Answer = TypeVar("_Answer")

NoteCall = Callable[[str, str, float], None]
"""Takes the name of the call, its outcome (ok, error, or the kind of a refusal) and its duration in seconds."""


class MeasuredProvider:
    """Passes all calls on to a provider and records them."""

    def __init__(self, provider: Provider, note: NoteCall) -> None:
        self._provider = provider
        self._note = note

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def is_elastic(self) -> bool:
        return self._provider.is_elastic

    async def list(self) -> Sequence[ProviderVm]:
        return await self._time_call("list", self._provider.list())

    async def create(self, count: int, request: str) -> CreatedVms:
        return await self._time_call("create", self._provider.create(count, request))

    async def delete(self, vm_ids: Sequence[str]) -> None:
        await self._time_call("delete", self._provider.delete(vm_ids))

    async def list_notices(self) -> Sequence[ProviderNotice]:
        return await self._time_call("notices", self._provider.list_notices())

    async def get_offer(self) -> VmOffer:
        return await self._time_call("offer", self._provider.get_offer())

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        await self._time_call("preempt", self._provider.preempt_vm(vm_id, notice_s))

    async def close(self, *, end_vms: bool) -> None:
        await self._provider.close(end_vms=end_vms)

    async def _time_call(self, call: str, answering: Awaitable[_Answer]) -> _Answer:
        began, outcome = time.perf_counter(), "error"
        try:
            answer = await answering
            refusal = answer.refusal if isinstance(answer, CreatedVms) else None
            outcome = "ok" if refusal is None else refusal.kind.value
            return answer
        finally:
            self._note(call, outcome, time.perf_counter() - began)


class MeasuredPools(MeasuredProvider):
    """The same of a provider with pools."""

    def __init__(self, provider: PooledProvider, note: NoteCall) -> None:
        super().__init__(provider, note)
        self._pooled = provider

    @property
    def pools(self) -> Mapping[str, PoolTerms]:
        return self._pooled.pools

    async def create_in(self, pool: str, count: int, request: str) -> CreatedVms:
        return await self._time_call("create", self._pooled.create_in(pool, count, request))

    async def list_pool_offers(self) -> Mapping[str, VmOffer]:
        return await self._time_call("offer", self._pooled.list_pool_offers())


def measure_provider(provider: Provider, note: NoteCall) -> Provider:
    """The provider with its calls recorded."""
    if isinstance(provider, PooledProvider):
        return MeasuredPools(provider, note)
    return MeasuredProvider(provider, note)
