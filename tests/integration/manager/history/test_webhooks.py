"""Webhooks: a real receiver over HTTP gets each event until it accepts it, signed and in order, from any leader."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from migrated_stores import migrated
from rest_world import SPEC, RestWorld, rest_world
from scripted_manager import ScriptedManager
from varuna_manager.domain.webhooks import WebhookTarget
from varuna_manager.history.webhooks import WebhookSender
from waiting import DEADLINE_S, POLL_S, until

SECRET = b"a secret of the receiver's"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that stands still for long, with this machine, is not sent the same again."""
    monkeypatch.setattr("varuna_manager.history.webhooks._TIMEOUT_S", DEADLINE_S)


@dataclass
class Receiver:
    """Checks signatures as docs/operations.md describes it."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    """The status codes of the next answers; then 204."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    taken: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def receive(self, headers: Any, body: bytes) -> int:
        parts = dict(part.split("=", 1) for part in headers["Varuna-Signature"].split(","))
        digest = hmac.new(SECRET, f"{parts['t']}.".encode() + body, hashlib.sha256).hexdigest()
        document: dict[str, Any] = json.loads(body)
        if not hmac.compare_digest(digest, parts["v1"]) or abs(time.time() - int(parts["t"])) > 300:
            self.wrong.append(headers["Varuna-Signature"])
        if (headers["Varuna-Event"], headers["Varuna-Event-Id"]) != (document["event"], str(document["id"])):
            self.wrong.append("the headers are of another event")
        self.attempts.append(document)
        status = self.statuses.pop(0) if self.statuses else 204
        if status == 204:
            self.taken.append(document)
        return status


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(found.receive(self.headers, body))
            self.send_header("Location", found.url)  # of an answer that redirects elsewhere
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}/varuna"
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    assert not found.wrong


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RestWorld]:
    migrated(tmp_path / "manager.db")
    async with rest_world(tmp_path) as made:
        yield made


@asynccontextmanager
async def sending(world: RestWorld, receiver: Receiver, **changes: Any) -> AsyncIterator[None]:
    """A leader that sends; it has read its cursor when this returns."""
    given = {"url": receiver.url, "secret": SECRET, "names": frozenset({"job_failed", "fleet_short"}), **changes}
    sender = WebhookSender(world.database, world.events, WebhookTarget(**given), first_pause_s=0.01)
    await sender._read_cursor()
    task = asyncio.create_task(sender.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def messages(documents: list[dict[str, Any]]) -> list[str]:
    return [document["message"] for document in documents]


async def test_what_is_asked_for_is_sent_in_order_and_what_was_before_is_not(
    world: RestWorld, receiver: Receiver
) -> None:
    job = (await world.ask("POST", "/api/v1/jobs", json={**SPEC, "labels": {"team": "vision"}})).json()
    await world.emit_event("job_failed", "long ago", job_id=job["id"])
    async with sending(world, receiver):
        await world.emit_event("job_failed", "first", job_id=job["id"], data={"exit_code": 3})
        await world.emit_event("job_succeeded", "nobody asked for this", job_id=job["id"])
        await world.emit_event("provider_refused", "second")
        await until(lambda: len(receiver.taken) == 2, "two webhooks")
    first, second = receiver.taken
    assert (first["event"], first["message"], first["data"]) == ("job_failed", "first", {"exit_code": 3})
    assert first["job"] == {"id": job["id"], "name": "gpt", "labels": {"team": "vision"}}
    assert (second["event"], second["message"], second["job"]) == ("fleet_short", "second", None)


async def test_one_that_is_not_taken_is_sent_again_before_the_next(world: RestWorld, receiver: Receiver) -> None:
    receiver.statuses = [500, 302, 404]
    async with sending(world, receiver):
        await world.emit_event("job_failed", "first")
        await world.emit_event("job_failed", "second")
        await until(lambda: len(receiver.taken) == 2, "two webhooks")
    assert messages(receiver.attempts) == ["first"] * 4 + ["second"]


async def test_the_next_leader_goes_on_where_the_last_one_was(world: RestWorld, receiver: Receiver) -> None:
    async with sending(world, receiver):
        await world.emit_event("job_failed", "first")
        await until(lambda: len(receiver.taken) == 1, "a webhook")
        await until(lambda: _cursor(world), "the cursor")
    await world.emit_event("job_failed", "while nobody led")
    async with sending(world, receiver):
        await until(lambda: len(receiver.taken) == 2, "the other one")
    assert messages(receiver.attempts) == ["first", "while nobody led"]


async def _cursor(world: RestWorld) -> bool:
    """Whether the newest event is delivered or given up."""
    async with world.database.read() as session:
        connection = await session.connection()
        done = await connection.exec_driver_sql("SELECT event_id = (SELECT max(id) FROM events) FROM webhook_cursor")
        return bool(done.scalar())


async def test_one_that_nobody_takes_is_given_up_with_an_event(world: RestWorld, receiver: Receiver) -> None:
    receiver.statuses = [503]
    async with sending(world, receiver, give_up_s=0.0):
        await world.emit_event("job_failed", "first")
        await world.emit_event("job_failed", "second")
        await until(lambda: receiver.taken, "the second one")
    assert messages(receiver.attempts) == ["first", "second"]
    (failed,) = (await world.ask("GET", "/api/v1/events", params={"kind": "webhook_failed"})).json()
    assert "(job_failed) was not taken by the webhook, and is given up: it answered 503" in failed["message"]


async def test_a_manager_tells_of_a_job_that_waited_too_long(
    manager: ScriptedManager, receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    await manager.start("--webhook-url", receiver.url, "--webhook-secret-file", str(tmp_path / "secret"))
    await until(lambda: _has_cursor(manager), "the cursor: what is older is not sent")
    await manager.submit(limits={"queue_timeout_s": 0.1})
    failed = await manager.job_in("failed")
    assert failed["error"].startswith("over its limit: it has waited for")
    payload = await until(lambda: receiver.taken and receiver.taken[0], "the webhook")
    assert (payload["event"], payload["job"]["name"]) == ("job_failed", "train")
    assert "limits.queue_timeout_s 0.1" in payload["message"]


async def _has_cursor(manager: ScriptedManager) -> bool:
    with closing(sqlite3.connect(f"file:{manager.data_dir / 'manager.db'}?mode=ro", uri=True)) as store:
        return bool(store.execute("SELECT count(*) FROM webhook_cursor").fetchone()[0])
