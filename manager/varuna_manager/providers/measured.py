"""A provider whose calls are timed and counted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from varuna_manager.providers.base import Created, Notice, Offer, Provider, ProviderVm

_Answer = TypeVar("_Answer")

NoteCall = Callable[[str, str, float], None]
"""Takes the call, its outcome (ok, error, the kind of a refusal) and its seconds."""


class MeasuredProvider:
    """The same provider, with its calls noted."""

    def __init__(self, provider: Provider, note: NoteCall) -> None:
        self._provider = provider
        self._note = note

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def grows(self) -> bool:
        return self._provider.grows

    async def list(self) -> Sequence[ProviderVm]:
        return await self._timed("list", self._provider.list())

    async def create(self, count: int, request: str) -> Created:
        return await self._timed("create", self._provider.create(count, request))

    async def delete(self, vm_ids: Sequence[str]) -> None:
        await self._timed("delete", self._provider.delete(vm_ids))

    async def notices(self) -> Sequence[Notice]:
        return await self._timed("notices", self._provider.notices())

    async def offer(self) -> Offer:
        return await self._timed("offer", self._provider.offer())

    async def preempt(self, vm_id: str, notice_s: float) -> None:
        await self._timed("preempt", self._provider.preempt(vm_id, notice_s))

    async def close(self, *, end_vms: bool) -> None:
        await self._provider.close(end_vms=end_vms)

    async def _timed(self, call: str, answering: Awaitable[_Answer]) -> _Answer:
        began, outcome = time.perf_counter(), "error"
        try:
            answer = await answering
            refusal = answer.refusal if isinstance(answer, Created) else None
            outcome = "ok" if refusal is None else refusal.kind.value
            return answer
        finally:
            self._note(call, outcome, time.perf_counter() - began)
