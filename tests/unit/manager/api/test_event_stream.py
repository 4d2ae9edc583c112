"""The stream of events as bytes: its form, and what happens to a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from varuna_manager.api.http.server_sent import ServerSentEvents
from varuna_manager.history.live import FeedMessage


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def scope(spec_version: str) -> dict[str, object]:
    return {"type": "http", "method": "GET", "path": "/", "asgi": {"spec_version": spec_version}, "client": ("x", 1)}


async def test_events_have_their_ids_and_silence_is_a_comment() -> None:
    sent: list[bytes] = []

    async def stream_messages() -> AsyncGenerator[FeedMessage | None, None]:
        yield FeedMessage(7, "odd", None, '{"id": 7}')
        yield None
        yield FeedMessage(None, "progress", "job", "{}")

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    await ServerSentEvents(stream_messages())(scope("2.4"), never, send)
    assert b"".join(sent).decode() == (
        'retry: 2000\n\nid: 7\nevent: odd\ndata: {"id": 7}\n\n: keep-alive\n\nevent: progress\ndata: {}\n\n'
    )


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_who_takes_nothing_is_cut_off_and_what_it_followed_ends(spec_version: str) -> None:
    ended = asyncio.Event()

    async def stream_messages() -> AsyncGenerator[FeedMessage | None, None]:
        try:
            while True:
                yield FeedMessage(1, "odd", None, "{}")
        finally:
            ended.set()

    async def send(message: Message) -> None:
        if b"data:" in message.get("body", b""):
            await asyncio.Event().wait()  # its buffers are full

    await ServerSentEvents(stream_messages(), slow_s=0.05)(scope(spec_version), never, send)
    assert ended.is_set()
