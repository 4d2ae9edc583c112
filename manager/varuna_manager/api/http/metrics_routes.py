"""/metrics, and the timing of every request."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from varuna_manager.metrics.exposition import MetricsService
from varuna_manager.metrics.instruments import Instruments

_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})


def metrics_route(service: MetricsService) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        text, media_type = await service.render_metrics(request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    return router


def time_requests(app: FastAPI, service: MetricsService) -> None:
    """Time every request that reaches the app, refused ones too. Call it last, to have the outermost middleware."""
    app.add_middleware(_TimingMiddleware, instruments=service.instruments)


class _TimingMiddleware:
    def __init__(self, app: ASGIApp, instruments: Instruments) -> None:
        self._app = app
        self._instruments = instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        answered = False

        def record(code: int) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._instruments.record_answer(_method(scope), _route(scope, code), code, time.perf_counter() - began)

        async def send_and_record(message: Message) -> None:
            # A stream of events lasts for hours: its beginning counts.
            if message["type"] == "http.response.start":
                record(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        except asyncio.CancelledError:
            record(503)  # as `roles.CutOffApp` answers
            raise
        except Exception:
            record(500)
            raise


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in _METHODS else "other"


def _route(scope: Scope, code: int) -> str:
    """The route's pattern, so that callers cannot create new label values."""
    route = scope.get("route")
    if isinstance(route, Route):
        return route.path.removeprefix("/api/v1")
    return "page" if code < 400 else "other"
