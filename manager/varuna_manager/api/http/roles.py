"""What a manager that does not lead, or cannot reach its store, answers over HTTP.

It reads like the leader does, from the same store. What would change something is refused with the leader's address.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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


def _not_now(text: str, leader_url: str | None) -> JSONResponse:
    answer = problem(503, text, leader=leader_url)
    answer.headers["Retry-After"] = str(_RETRY_AFTER_S)
    return answer
