"""A request that is under way when a manager changes its role, on the server that the manager answers with."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from varuna_manager.api.http.connections import PatientHttp
from varuna_manager.server.process import _make_http_server
from waiting import DEADLINE_S, until


class Slow:
    """An application that never finishes an answer. `begins`: it has sent the answer's start."""

    def __init__(self, *, begins: bool = False) -> None:
        self._begins = begins
        self.calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        if self._begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"the first", "more_body": True})
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[uvicorn.Server, str]]:
    """The manager's server, which has no patience at its end, and its URL."""
    server = _make_http_server(app, None, ())
    server.config.timeout_graceful_shutdown = 0
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    task = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started, "the server")
    try:
        yield server, url
    finally:
        server.should_exit = True
        await task


@pytest.mark.parametrize(("method", "says"), [("GET", "its role; try again"), ("POST", "it may have taken effect")])
async def test_a_request_that_is_cut_off_is_told_to_come_again(method: str, says: str) -> None:
    slow = Slow()
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client, serving(slow) as (server, url):
        asking = asyncio.create_task(client.request(method, f"{url}/api/v1/jobs"))
        await until(lambda: slow.calls, "the call")
        server.should_exit = True
        answer = await asking
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) >= 1
    problem = answer.json()
    assert (problem["status"], problem["leader"]) == (503, None)
    assert f"{method} /api/v1/jobs was cut off" in problem["detail"]
    assert says in problem["detail"]


async def test_an_answer_that_has_begun_ends_there() -> None:
    slow = Slow(begins=True)
    async with (
        httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client,
        serving(slow) as (server, url),
        client.stream("GET", url) as answer,
    ):
        assert answer.status_code == 200
        parts = answer.aiter_raw()
        assert await anext(parts) == b"the first"
        server.should_exit = True
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(parts)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_connection_that_was_just_opened_may_still_ask(monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    monkeypatch.setattr(PatientHttp, "first_request_s", DEADLINE_S if asks else 0.0)
    async with serving(PlainTextResponse("answered")) as (server, url):
        server.config.timeout_graceful_shutdown = None
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        await until(lambda: server.server_state.connections, "the connection")
        server.should_exit = True
        await until(lambda: not server.servers[0].is_serving(), "the server to stop")
        if asks:
            writer.write(b"GET / HTTP/1.1\r\nHost: manager\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.endswith(b"answered") if asks else not answer
