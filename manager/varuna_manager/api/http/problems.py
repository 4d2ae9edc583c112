"""Errors as RFC 9457 problem documents whose `detail` is one line for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from varuna_manager.services.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    ServiceError,
    UnauthenticatedError,
    UnavailableError,
)

_TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Forbidden",
    404: "Not found",
    409: "Conflict",
    413: "Too large",
    422: "Invalid request",
    431: "Headers too large",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available now",
}
_STATUS: dict[type[ServiceError], int] = {
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    InvalidError: 422,
    UnavailableError: 503,
}


_MEDIA_TYPE = "application/problem+json"
_SCHEMA = {
    "type": "object",
    "title": "Problem",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what is wrong and what helps, for a person"},
    },
    "required": ["type", "title", "status", "detail"],
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": title, "content": {_MEDIA_TYPE: {"schema": _SCHEMA}}} for status, title in _TITLES.items()
}
"""For the API's description: any call may be answered so."""


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> JSONResponse:
    document = {"type": "about:blank", "title": _TITLES.get(status, "Error"), "status": status, "detail": detail}
    return JSONResponse({**document, **extra}, status, dict(headers or {}), _MEDIA_TYPE)


def problem_of(error: ServiceError) -> JSONResponse:
    status = _STATUS[type(error)]
    return problem(status, str(error), {"WWW-Authenticate": "Bearer"} if status == 401 else None)


def install(app: FastAPI) -> None:
    """Answer every error of the app with a problem document."""
    log = structlog.get_logger("varuna.http")

    async def service_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ServiceError)
        return problem_of(error)

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        errors = [_field_error(entry) for entry in error.errors()]
        return problem(422, "; ".join(entry["text"] for entry in errors), errors=errors)

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", path=request.url.path, exc_info=error)
        return problem(500, f"{type(error).__name__}: the manager's log has the traceback")

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)


def _field_error(entry: dict[str, Any]) -> dict[str, str]:
    """The field, its value, and what is wanted of it."""
    path = ".".join(str(part) for part in entry["loc"] if part != "body")
    message = str(entry["msg"]).removeprefix("Value error, ")
    kind = entry["type"]
    if kind == "missing":
        text = f"{path or 'the body'} is missing: give it"
    elif kind == "extra_forbidden":
        text = f"{path} is not a field of this: take it out, or check its spelling"
    elif not path:
        text = message
    else:
        text = f"{path} is {entry.get('input')!r}: {message[:1].lower()}{message[1:]}"
    return {"field": path, "text": " ".join(text.split())}
