"""Callers that hold connections and send nothing, on the manager's own HTTP server."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from varuna_client import AsyncClient
from varuna_client.rest import client as client_module
from varuna_manager.api.http.connections import LimitedListener, PatientHttp
from varuna_manager.server.process import _make_http_server
from varuna_proto.hosts import networks
from waiting import DEADLINE_S, until

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"


class Hasty(PatientHttp):
    head_s = body_s = rest_s = unread_s = 0.2


class Unhurried(PatientHttp):
    head_s = body_s = rest_s = unread_s = DEADLINE_S


_ports: list[int] = []
"""Of the callers' ends of connections, one for each request."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it read; at once to /early, with a lot to /large."""
    _ports.append(scope["client"][1])
    request = Request(scope, receive)
    body = b"" if scope["path"] == "/early" else await request.body()
    large = b"x" * 20_000_000 if scope["path"] == "/large" else b""
    await PlainTextResponse(body or large or b"hello")(scope, receive, send)


@asynccontextmanager
async def serving(protocol: type[asyncio.Protocol] = Unhurried, **limits: Any) -> AsyncIterator[LimitedListener]:
    """The socket of a server with these limits."""
    listener = LimitedListener(
        socket.create_server(("127.0.0.1", 0)), **{"most": 1000, "most_per_address": 1000, **limits}
    )
    config = uvicorn.Config(
        echo,
        http=protocol,
        lifespan="off",
        log_config=None,
        timeout_keep_alive=int(DEADLINE_S),
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started, "the server")
    try:
        yield listener
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def dial(server: LimitedListener, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(server.getsockname(), source_address=(source, 0), timeout=DEADLINE_S)


def ask(server: LimitedListener, source: str) -> bytes:
    """The answer to a whole request from this address; empty if the server hangs up."""
    with dial(server, source) as connection:
        try:
            connection.sendall(GET)
            return connection.recv(12)
        except ConnectionError:
            return b""


async def test_half_open_requests_of_one_address_keep_no_other_out(connections: ExitStack) -> None:
    async with serving(most_per_address=20) as server:
        held = [connections.enter_context(dial(server, "127.0.0.9")) for _ in range(100)]
        for connection in held:
            try:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
            except ConnectionError:
                continue
        assert await asyncio.to_thread(ask, server, "127.0.0.9") == b""
        assert await asyncio.to_thread(ask, server, "127.0.0.10") == b"HTTP/1.1 200"
        for connection in held:
            connection.close()
        await until(lambda: not server.held, "that they are forgotten")
        assert await asyncio.to_thread(ask, server, "127.0.0.9") == b"HTTP/1.1 200"


async def test_a_proxy_stands_for_many_callers(connections: ExitStack) -> None:
    async with serving(most_per_address=2, proxies=networks("127.0.0.9")) as server:
        for _ in range(10):
            connections.enter_context(dial(server, "127.0.0.9"))
        assert await asyncio.to_thread(ask, server, "127.0.0.9") == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HT",
        GET[:-2],
        GET + b"GET /again",  # answered once, and then silent
        POST,
        POST + b"x" * 999,
        POST.replace(b" / ", b" /early ") + b"x",  # answered, and never read to its end
        GET.replace(b" / ", b" /large "),  # an answer that is not read
    ],
)
async def test_who_does_not_get_on_is_hung_up_on(data: bytes, connections: ExitStack) -> None:
    async with serving(Hasty) as server:
        connection = connections.enter_context(dial(server))
        connection.sendall(data)
        await until(lambda: server.held, "the connection")
        await until(lambda: not server.held, "that the server hangs up")


async def test_a_caller_has_its_time_again_when_the_machine_has_stood_still(connections: ExitStack) -> None:
    class Brisk(PatientHttp):
        head_s = 1.0

    async with serving(Brisk) as server:
        connection = connections.enter_context(dial(server))
        await until(lambda: server.held, "the connection")
        time.sleep(2.5)  # the whole process, as when it is stopped  # noqa: ASYNC251
        for _ in range(5):  # its timers first
            await asyncio.sleep(0)
        connection.sendall(GET)
        assert await asyncio.to_thread(connection.recv, 12) == b"HTTP/1.1 200"
        await until(lambda: not server.held, "that the server hangs up on who asks no more")


async def test_who_dribbles_a_refused_body_is_hung_up_on(connections: ExitStack) -> None:
    async with serving(Hasty) as server:
        _, writer = await asyncio.open_connection(*server.getsockname())
        writer.write(POST.replace(b" / ", b" /early ").replace(b"1000", b"1000000"))
        dribbling = asyncio.create_task(_dribble(writer))
        await until(lambda: server.held, "the connection")
        await until(lambda: not server.held, "that the server hangs up")
        await dribbling


async def _dribble(writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then, for as long as the server takes it."""
    try:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        writer.close()


async def test_who_gets_on_is_served() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.getsockname())
        for _ in range(3):
            writer.write(POST + b"y" * 1000)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(1000) == b"y" * 1000
        writer.close()
        await writer.wait_closed()


def test_the_client_stops_using_idle_connections_before_the_manager_closes_them() -> None:
    manager_s = _make_http_server(echo, None, ()).config.timeout_keep_alive
    assert manager_s >= 2 * client_module._REUSED_FOR_S


@pytest.mark.parametrize(("reused_for_s", "connections"), [(0.0, 2), (DEADLINE_S, 1)])
async def test_the_client_opens_a_new_connection_when_its_own_was_idle(
    monkeypatch: pytest.MonkeyPatch, reused_for_s: float, connections: int
) -> None:
    monkeypatch.setattr(client_module, "_REUSED_FOR_S", reused_for_s)
    async with serving() as server, AsyncClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
        _ports.clear()
        assert await client.is_ready()
        assert await client.is_ready()
    assert len(set(_ports)) == connections
