"""Answers concurrent requests in batches: a fleet that reconnects needs few transactions, not one per VM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from varuna_manager.db.engine import NotLeaderError, StoreAwayError

Q = TypeVar("Q")
A = TypeVar("A")


class RequestBatcher(Generic[Q, A]):
    """`answer`: makes one answer for each request, in their order. It is called once at a time."""

    def __init__(self, answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]], *, most: int = 500) -> None:
        self._answer = answer
        self._most = most
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._answering: asyncio.Task[None] | None = None

    async def add_request(self, request: Q) -> A:
        """Raises what `answer` raises for this request alone; NotLeaderError, StoreAwayError for all of its batch."""
        answered: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answered))
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer_all())
        return await answered

    async def _answer_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                await self._answer_batch([(request, answered) for request, answered in batch if not answered.done()])
        finally:
            self._answering = None

    async def _answer_batch(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._answer([request for request, _ in batch])
        except Exception as error:
            is_for_all = isinstance(error, NotLeaderError | StoreAwayError)
            if len(batch) > 1 and not is_for_all:  # one of them may be the cause: the others must not fail with it
                for one in batch:
                    await self._answer_batch([one])
                return
            for _, answered in batch:
                if not answered.done():
                    answered.set_exception(error)
            return
        for (_, answered), answer in zip(batch, answers, strict=True):
            if not answered.done():
                answered.set_result(answer)
