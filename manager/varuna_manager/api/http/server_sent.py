"""Server-sent events (WHATWG HTML, section 9.2), as a response that drops slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from varuna_manager.history.live import FeedMessage

_RETRY_MS = 2000
SLOW_S = 30.0


class _TooSlowError(Exception):
    pass


class ServerSentEvents(StreamingResponse):
    """Sends each message; None becomes a comment, which keeps the connection open."""

    media_type = "text/event-stream"

    def __init__(self, messages: AsyncGenerator[FeedMessage | None, None], *, slow_s: float = SLOW_S) -> None:
        """A reader that reads nothing for `slow_s` is cut off."""
        self._lines = _render_lines(messages)
        super().__init__(self._lines, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._slow_s = slow_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._slow_s):
                    await send(message)
            except TimeoutError:
                raise _TooSlowError from None

        try:
            async with aclosing(self._lines):
                await super().__call__(scope, receive, send_in_time)
        except* _TooSlowError:
            # The rest would wait in memory; the reader can come back with Last-Event-ID.
            structlog.get_logger("varuna.http").info(
                "a reader of events reads nothing: cut off", client=scope.get("client")
            )


async def _render_lines(messages: AsyncGenerator[FeedMessage | None, None]) -> AsyncGenerator[str, None]:
    yield f"retry: {_RETRY_MS}\n\n"
    async with aclosing(messages):
        async for each in messages:
            if each is None:
                yield ": keep-alive\n\n"
            else:
                number = "" if each.id is None else f"id: {each.id}\n"
                yield f"{number}event: {each.event}\ndata: {each.data}\n\n"
