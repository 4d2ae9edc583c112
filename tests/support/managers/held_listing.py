"""Holds back a cloud's answers: to a provider's list, so that it arrives after the answer to a later one, or to its
creations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

from varuna_manager.providers.base import CreatedVms
from waiting import DEADLINE_S, until

ENOUGH_S = 1.0
"""Time for a later list that waits for nothing. One that waits for the first is given no more."""


class HeldListing:
    """`fetch`: the provider's blocking call, which is made in a thread."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._is_first = True
        self._is_held = threading.Event()
        self._may_arrive = threading.Event()

    def answer(self) -> Any:
        """The answer to the first call arrives after `release`."""
        is_first, self._is_first = self._is_first, False
        answer = self._fetch()
        if is_first:
            self._is_held.set()
            assert self._may_arrive.wait(DEADLINE_S)
        return answer

    async def wait_held(self) -> None:
        """Until the cloud has made its first answer."""
        assert await asyncio.to_thread(self._is_held.wait, DEADLINE_S)

    def release(self) -> None:
        self._may_arrive.set()


@asynccontextmanager
async def _held_listing(provider: Any) -> AsyncIterator[HeldListing]:
    """In the place of the provider's `_fetch_instances`."""
    held = HeldListing(provider._fetch_instances)
    with patch.object(provider, "_fetch_instances", held.answer):
        try:
            yield held
        finally:
            held.release()


async def create_beside_held_list(provider: Any) -> CreatedVms:
    """What a request for one VM makes while the answer to an earlier list is held back, which arrives afterwards."""
    async with _held_listing(provider) as listing:
        early = asyncio.create_task(provider.list())
        await listing.wait_held()
        late = asyncio.create_task(provider.create(1, "r"))
        await asyncio.wait({late}, timeout=ENOUGH_S)
        listing.release()
        await early
        created: CreatedVms = await late
        return created


async def list_beside_held_creations(provider: Any, owner: Any, call: str, at_once: int) -> CreatedVms:
    """Lists, and uses a thread of the event loop, while as many creations are held back as that has threads.

    `owner.call`: the blocking call that makes a VM.
    """
    begun, may_end, make_vm = threading.Semaphore(0), threading.Event(), getattr(owner, call)

    def hold(*arguments: Any, **named: Any) -> Any:
        begun.release()
        assert may_end.wait(DEADLINE_S)
        return make_vm(*arguments, **named)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(at_once))
    with patch.object(owner, call, hold):
        creation = asyncio.create_task(provider.create(at_once, "r"))
        try:
            for _ in range(at_once):
                await until(lambda: begun.acquire(blocking=False), "a creation")
            async with asyncio.timeout(DEADLINE_S / 2):
                await asyncio.gather(provider.list(), asyncio.to_thread(threading.get_ident))
        finally:
            may_end.set()
            created: CreatedVms = await creation
    return created
