"""Errors as RFC 9457 problem documents with a `detail` in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from varuna_manager.answers.errors import (
    ChangedError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    MissingError,
    ServiceError,
    UnauthenticatedError,
    UnavailableError,
)

_TYPE = "urn:varuna:problem:"
_KINDS = {
    400: ("bad-request", "Bad request"),
    401: ("not-authenticated", "Not authenticated"),
    403: ("forbidden", "Forbidden"),
    404: ("not-found", "Not found"),
    405: ("method-not-allowed", "Method not allowed"),
    409: ("conflict", "Conflict"),
    412: ("changed", "Changed meanwhile"),
    413: ("too-large", "Too large"),
    415: ("unsupported-media-type", "Unsupported media type"),
    422: ("invalid", "Invalid request"),
    429: ("too-many-requests", "Too many requests"),
    431: ("headers-too-large", "Headers too large"),
    500: ("internal", "Internal error"),
    503: ("unavailable", "Not available now"),
}
"""By HTTP status: the last word of `type`, and `title`."""
_STATUS: dict[type[ServiceError], int] = {
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    MissingError: 404,
    ConflictError: 409,
    ChangedError: 412,
    InvalidError: 422,
    UnavailableError: 503,
}

_SHOWN_CHARS = 200
"""At most so much of a wrong value is repeated."""
_MEDIA_TYPE = "application/problem+json"
_FIELDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"field": {"type": "string"}, "text": {"type": "string"}},
        "required": ["field", "text"],
    },
    "description": "422: the fields that are wrong, and why",
}
SCHEMA = {
    "type": "object",
    "title": "ProblemDocument",
    "properties": {
        "type": {"type": "string", "enum": [_TYPE + slug for slug, _ in _KINDS.values()]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what is wrong and what to do about it, in one line"},
        "errors": _FIELDS,
        "leader": {"type": ["string", "null"], "description": "503: the manager that leads, if it is not this one"},
    },
    "required": ["type", "title", "status", "detail"],
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": title,
        "content": {_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
    }
    for status, (_, title) in _KINDS.items()
}
"""For the API's description: every request may get these answers."""


def kinds() -> list[tuple[int, str, str]]:
    """(status, `type`, title) of every kind of problem."""
    return [(status, _TYPE + slug, title) for status, (slug, title) in _KINDS.items()]


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> JSONResponse:
    slug, title = _KINDS.get(status, (str(status), "Error"))
    document = {"type": _TYPE + slug, "title": title, "status": status, "detail": detail}
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
        path = request.url.path
        detail = f"{request.method} {path}: {error.detail}"
        if error.status_code == 404:
            detail = f"there is nothing at {path}: /docs lists all paths"
        elif error.status_code == 405:
            detail = f"{path} does not take {request.method}: /docs lists what it takes"
        return problem(error.status_code, detail, error.headers)

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
    """The field, its value, and what it should be."""
    path = ".".join(str(part) for part in entry["loc"] if part != "body")
    message = str(entry["msg"]).removeprefix("Value error, ")
    kind = entry["type"]
    if kind == "missing":
        text = f"{path or 'the body'} is missing"
    elif kind == "extra_forbidden":
        text = f"{path} is not a field here: remove it, or check its spelling"
    elif not path:
        text = message
    elif path.partition(".")[0] == "secrets":
        text = f"{path}: {message}"  # the value may be the secret itself
    else:
        text = f"{path} is {_shown(entry.get('input'))}: {message[:1].lower()}{message[1:]}"
    return {"field": _writable(path), "text": _writable(" ".join(text.split()))}


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _writable(text: str) -> str:
    """The text without half characters (lone surrogates), which a request may have and an answer cannot."""
    return text.encode(errors="backslashreplace").decode()
