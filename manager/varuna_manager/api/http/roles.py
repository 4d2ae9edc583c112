"""What a manager that does not lead, cannot reach its store, or changes its role answers over HTTP.

It reads like the leader does, from the same store. What would change something is refused with the leader's address.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varuna_manager.api.http.problems import problem
from varuna_manager.db.engine import NotLeaderError, StoreAwayError
from varuna_manager.services.leadership import Standing

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LEADERS_OWN = frozenset({"/readyz", "/api/v1/readyz", "/api/v1/events/stream"})
"""What only the leader knows at once."""
_RETRY_AFTER_S = 1


def install(app: FastAPI) -> None:
    """Answer 503 where a request meets a store that is away, or a lease that is over."""

    async def not_now(request: Request, error: Exception) -> JSONResponse:
        return _not_now(str(error), None)

    app.add_exception_handler(NotLeaderError, not_now)
    app.add_exception_handler(StoreAwayError, not_now)


@dataclass(frozen=True)
class Standby:
    """The application of a manager that waits to lead."""

    app: ASGIApp
    standing: Standing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"] not in _READING or scope["path"] in _LEADERS_OWN):
            leader = self.standing.leader
            answer = _not_now(self.standing.text(), leader.http_url if leader is not None else None)
            await answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@dataclass(frozen=True)
class CutOff:
    """The application of a manager whose role ends: a request that has no answer by then is told to come again.

    The server cancels such a request, and would call it an internal error.
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
            text = f"{scope['method']} {scope['path']} was cut off: this manager ends or changes its role; "
            may_count = scope["method"] not in _READING
            text += "it may have taken effect all the same: look, and try again" if may_count else "try again"
            await _not_now(text, None)(scope, receive, send)


def _not_now(text: str, leader_url: str | None) -> JSONResponse:
    answer = problem(503, text, leader=leader_url)
    answer.headers["Retry-After"] = str(_RETRY_AFTER_S)
    return answer
