"""/metrics, and the timing of every call."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varuna_manager.services.metrics.exposition import MetricsService
from varuna_manager.services.metrics.instruments import Instruments

_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})


def metrics_route(service: MetricsService) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        text, media_type = await service.text(request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    return router


def measure(app: FastAPI, service: MetricsService) -> None:
    """Time every call that reaches the app, refused ones too. Call it last: it has to stand before all else."""
    app.add_middleware(_Measured, instruments=service.instruments)


class _Measured:
    def __init__(self, app: ASGIApp, instruments: Instruments) -> None:
        self._app = app
        self._instruments = instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        answered = False

        def note(code: int) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._instruments.note_answer(_method(scope), _route(scope, code), code, time.perf_counter() - began)

        async def noting(message: Message) -> None:
            # A stream of events goes on for hours: what counts is when it begins.
            if message["type"] == "http.response.start":
                note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            note(503)  # as `roles.CutOff` answers
            raise
        except Exception:
            note(500)
            raise


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in _METHODS else "other"


def _route(scope: Scope, code: int) -> str:
    """The route's pattern: a caller cannot make up new ones."""
    route = scope.get("route")
    if isinstance(route, Route):
        return route.path.removeprefix("/api/v1")
    return "page" if code < 400 else "other"
