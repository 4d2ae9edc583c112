"""Server-sent events (WHATWG HTML, section 9.2) as a response that drops readers who do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from varuna_manager.services.live import Told

_RETRY_MS = 2000
SLOW_S = 30.0


class _TooSlowError(Exception):
    pass


class ServerSentEvents(StreamingResponse):
    """Sends what is told; None becomes a comment, which keeps the connection open."""

    media_type = "text/event-stream"

    def __init__(self, told: AsyncGenerator[Told | None, None], *, slow_s: float = SLOW_S) -> None:
        """`slow_s`: who takes nothing for so long is cut off."""
        self._lines = _text(told)
        super().__init__(self._lines, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._slow_s = slow_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patiently(message: Message) -> None:
            try:
                async with asyncio.timeout(self._slow_s):
                    await send(message)
            except TimeoutError:
                raise _TooSlowError from None

        try:
            async with aclosing(self._lines):
                await super().__call__(scope, receive, patiently)
        except* _TooSlowError:
            # The rest would only wait in memory; it may come back with Last-Event-ID.
            structlog.get_logger("varuna.http").info(
                "a reader of events takes nothing: cut off", client=scope.get("client")
            )


async def _text(told: AsyncGenerator[Told | None, None]) -> AsyncGenerator[str, None]:
    yield f"retry: {_RETRY_MS}\n\n"
    async with aclosing(told):
        async for each in told:
            if each is None:
                yield ": keep-alive\n\n"
            else:
                number = "" if each.id is None else f"id: {each.id}\n"
                yield f"{number}event: {each.event}\ndata: {each.data}\n\n"
