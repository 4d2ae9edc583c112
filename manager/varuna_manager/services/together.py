"""Answers together what is asked meanwhile: a whole fleet that dials again needs few transactions, not one per VM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    """`answer`: one answer for each question, in their order. It runs once at a time."""

    def __init__(self, answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]], *, most: int = 500) -> None:
        self._answer = answer
        self._most = most
        self._asked: list[tuple[Q, asyncio.Future[A]]] = []
        self._answering: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """Raises what `answer` raises for this question alone."""
        answered: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked.append((question, answered))
        if self._answering is None:
            self._answering = asyncio.create_task(self._answer_all())
        return await answered

    async def _answer_all(self) -> None:
        try:
            while self._asked:
                batch, self._asked = self._asked[: self._most], self._asked[self._most :]
                await self._answer_batch([(question, answered) for question, answered in batch if not answered.done()])
        finally:
            self._answering = None

    async def _answer_batch(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._answer([question for question, _ in batch])
        except Exception as error:
            if len(batch) > 1:  # one of them may be at fault: the others are not to suffer for it
                for one in batch:
                    await self._answer_batch([one])
            elif batch and not batch[0][1].done():
                batch[0][1].set_exception(error)
            return
        for (_, answered), answer in zip(batch, answers, strict=True):
            if not answered.done():
                answered.set_result(answer)
