"""Sends important events to the operators' URL at once: signed, in order, repeated until accepted.

The leader reads the event log from a cursor in the store. So an event is sent at least once, whichever manager leads,
and a receiver recognises a repeated one by its id. This is a task of its own: no decision waits for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import structlog
from sqlalchemy import func, select

from varuna_manager.answers.documents import format_time
from varuna_manager.db.engine import Database, NotLeaderError
from varuna_manager.db.models import EventRow, JobRow, WebhookCursorRow
from varuna_manager.domain.webhooks import WEBHOOK_EVENTS, WebhookTarget, sign
from varuna_manager.world.events import EventLog

_TIMEOUT_S = 10.0
_LONGEST_PAUSE_S = 60.0
_AFTER_ERROR_S = 1.0
_THE_ROW = 1


class WebhookSender:
    """`first_pause_s`: after the first refusal; each further one of the same event doubles it."""

    def __init__(
        self,
        database: Database,
        events: EventLog,
        target: WebhookTarget,
        now: Callable[[], float] = time.time,
        *,
        first_pause_s: float = 1.0,
    ) -> None:
        self._database = database
        self._events = events
        self._target = target
        self._now = now
        self._first_pause_s = first_pause_s
        self._kinds = {WEBHOOK_EVENTS[name]: name for name in sorted(target.names)}
        self._log = structlog.get_logger("varuna.webhooks").bind(url=target.url)

    async def run(self) -> None:
        """Send until cancelled. Raises NotLeaderError."""
        while True:
            try:
                await self._send_all()
            except NotLeaderError:
                raise
            except Exception as error:
                self._log.warning("webhooks are sent again in a moment", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_AFTER_ERROR_S)

    async def _send_all(self) -> None:
        cursor = await self._read_cursor()
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            async for event in self._events.follow_events(cursor, kinds=tuple(self._kinds)):
                if event is not None:
                    await self._deliver(client, event)

    async def _read_cursor(self) -> int:
        """The last event that is done. Initially the newest one, because past events are not sent."""
        async with self._database.write() as session:
            row = await session.get(WebhookCursorRow, _THE_ROW)
            if row is None:
                row = WebhookCursorRow(id=_THE_ROW, event_id=await session.scalar(select(func.max(EventRow.id))) or 0)
                session.add(row)
            return row.event_id

    async def _deliver(self, client: httpx.AsyncClient, event: EventRow) -> None:
        """Send the event until it is accepted or too old."""
        body, pause_s = json.dumps(await self._document(event)).encode(), self._first_pause_s
        refusal = await self._post(client, event, body)
        while refusal and self._now() - event.at < self._target.give_up_s:
            self._log.warning("a webhook was not taken", event=event.id, error=refusal, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            refusal = await self._post(client, event, body)
        async with self._database.write() as session:
            (await session.get_one(WebhookCursorRow, _THE_ROW)).event_id = event.id
            if refusal:
                text = f"event {event.id} ({event.kind}) was not taken by the webhook, and is given up: {refusal}"
                self._events.emit_event(session, "webhook_failed", text, job_id=event.job_id, data={"event": event.id})

    async def _post(self, client: httpx.AsyncClient, event: EventRow, body: bytes) -> str:
        """Why it was not accepted; empty: it was."""
        headers = {
            "Content-Type": "application/json",
            "Varuna-Event": self._kinds[event.kind],
            "Varuna-Event-Id": str(event.id),
            "Varuna-Signature": sign(self._target.secret, int(self._now()), body),
        }
        try:
            # Only the status is read, however long the answer is.
            async with client.stream("POST", self._target.url, content=body, headers=headers) as answer:
                return "" if answer.is_success else f"it answered {answer.status_code}"
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"

    async def _document(self, event: EventRow) -> dict[str, Any]:
        async with self._database.read() as session:
            job = None if event.job_id is None else await session.get(JobRow, event.job_id)
        job_document = None if job is None else {"id": job.id, "name": job.name, "labels": job.spec.get("labels", {})}
        return {
            "id": event.id,
            "event": self._kinds[event.kind],
            "at": format_time(event.at),
            "message": event.message,
            "job": job_document,
            "generation": event.generation,
            "vm_id": event.vm_id,
            "data": event.data,
        }
