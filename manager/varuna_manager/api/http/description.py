"""What the API says of itself: tags, examples, the schema of problems."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from varuna_manager.api.http import problems
from varuna_manager.api.http.examples import DOCUMENTS

TAGS = [
    {"name": "jobs", "description": "Submitting, looking at and changing jobs."},
    {"name": "history", "description": "Generations, plans, steps, where the time went, cost, checkpoints."},
    {"name": "logs", "description": "What workers wrote, and where they stood."},
    {"name": "fleet", "description": "VMs."},
    {"name": "events", "description": "What happened and was decided, with the reasons; as it happens, too."},
    {"name": "access", "description": "Tokens, the audit record, and the joining of agents."},
    {"name": "agents", "description": "What new VMs fetch."},
    {"name": "archives", "description": "Packed workdirs."},
    {"name": "health", "description": "Whether it lives."},
]
_INTRODUCTION = """\
Lists are JSON arrays; one that goes on has a `Link` header to its next page (`rel="next"`). Times are ISO 8601, UTC.
Errors are problem documents (RFC 9457, `application/problem+json`) with a `type` that stays the same and a `detail` in
one line. A manager with tokens takes them as `Authorization: Bearer vt1...`."""


def complete(app: FastAPI) -> None:
    """Add to the app's description what FastAPI does not know."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title,
                version=app.version,
                description=_INTRODUCTION,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            schemas = made["components"]["schemas"]
            schemas["Problem"] = problems.SCHEMA
            for name, example in DOCUMENTS.items():
                schemas[name]["examples"] = [example]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{}, {"token": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
