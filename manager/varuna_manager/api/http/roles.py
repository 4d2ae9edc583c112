"""HTTP answers of a manager that does not lead, cannot reach its store, or changes its role.

A standby answers reads from the store that it shares with the leader. It refuses changes and names the leader.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varuna_manager.api.http.problems import problem
from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.world.leadership import Standing

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LEADERS_OWN = frozenset({"/readyz", "/api/v1/readyz", "/api/v1/events/stream"})
"""Paths that only the leader can answer."""
_RETRY_AFTER_S = 1


def install(app: FastAPI) -> None:
    """Answer 503 if the store cannot be reached or the leader's lease is over."""

    async def not_now(request: Request, error: Exception) -> JSONResponse:
        return _not_now(str(error), None)

    app.add_exception_handler(NotLeaderError, not_now)
    app.add_exception_handler(StoreAwayError, not_now)


@dataclass(frozen=True)
class StandbyApp:
    """The application of a standby."""

    app: ASGIApp
    standing: Standing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"] not in _READING or scope["path"] in _LEADERS_OWN):
            leader = self.standing.leader
            answer = _not_now(self.standing.describe_leader(), leader.http_url if leader is not None else None)
            await answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@dataclass(frozen=True)
class CutOffApp:
    """The application of a manager whose role may end: requests that are still open then are answered with 503.

    The server cancels such requests; uvicorn alone would answer 500.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, note)
        except asyncio.CancelledError:
            if has_begun or scope["type"] != "http":
                raise
            text = f"{scope['method']} {scope['path']} was cut off: this manager stops or changes its role; "
            may_have_effect = scope["method"] not in _READING
            text += "it may have taken effect: check, and try again" if may_have_effect else "try again"
            await _not_now(text, None)(scope, receive, send)


def _not_now(text: str, leader_url: str | None) -> JSONResponse:
    answer = problem(503, text, leader=leader_url)
    answer.headers["Retry-After"] = str(_RETRY_AFTER_S)
    return answer
