"""Reads JSON documents, with errors that name the field and the value."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

__all__ = ["parse_document", "what_is_wrong"]

Document = TypeVar("Document", bound=BaseModel)

_LONGEST_SHOWN = 60


def parse_document(kind: type[Document], text: str, name: str) -> Document:
    """Parse a document of the kind. Raises ValueError naming the kind, the field, its value and the fault."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{name}: {what_is_wrong(error)}") from None


def what_is_wrong(error: ValidationError) -> str:
    """The first fault: its field if there is one, the fault, and the value, shortened, if it is a scalar."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "json_invalid":
        where = "document"
    message = f"{where}: " if where else ""
    message += str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"] or not isinstance(first["input"], str | int | float | None):
        return message
    value = repr(first["input"])
    shown = value if len(value) <= _LONGEST_SHOWN else value[: _LONGEST_SHOWN - 3] + "..."
    return f"{message} (got {shown})"
