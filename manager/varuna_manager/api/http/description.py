"""The API's description (OpenAPI): tags, examples, the schema of problems."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from varuna_manager.api.http import problems
from varuna_manager.api.http.examples import DOCUMENTS
from varuna_proto import rest, rest_fleet

TAGS = [
    {"name": "jobs", "description": "Submit, read and change jobs."},
    {"name": "history", "description": "A job's generations, plans, steps, time, cost and checkpoints."},
    {"name": "logs", "description": "What workers wrote, and the stacks of workers that hung."},
    {"name": "fleet", "description": "The VMs and how many of them to keep."},
    {
        "name": "events",
        "description": "What happened and what was decided, with reasons: as lists and as a stream.",
    },
    {"name": "access", "description": "Tokens, the audit log, and certificates for agents."},
    {"name": "agents", "description": "Files that new VMs install."},
    {"name": "archives", "description": "Packed workdirs."},
    {"name": "health", "description": "Probes for monitoring."},
]
_INTRODUCTION = """\
Lists are JSON arrays; if there is more, a `Link` header has the address of the next page (`rel="next"`). Times are ISO
8601, UTC. Errors are problem documents (RFC 9457, `application/problem+json`) with a fixed `type` and a `detail` in one
line. A manager that requires tokens takes them as `Authorization: Bearer vt1...`."""


def complete(app: FastAPI) -> None:
    """Add to the app's description what FastAPI cannot derive."""

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
            for module in (rest, rest_fleet):
                _describe_fields(schemas, module)
            schemas["ProblemDocument"] = problems.SCHEMA
            for name, example in DOCUMENTS.items():
                schemas[name]["examples"] = [example]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{}, {"token": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_fields(schemas: Mapping[str, Any], documents: ModuleType) -> None:
    """Give each field the text that stands below it in the class of its document.

    pydantic can do that, too (`use_attribute_docstrings`), but reads the file again for each use of each class, when
    routes are made.
    """
    for document in ast.parse(inspect.getsource(documents)).body:
        if isinstance(document, ast.ClassDef) and document.name in schemas:
            fields = schemas[document.name]["properties"]
            for field, text in zip(document.body, document.body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                        fields[name]["description"] = inspect.cleandoc(words)
