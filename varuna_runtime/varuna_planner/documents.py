"""Reading JSON documents with errors that a person can act on."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

__all__ = ["parse_document", "what_is_wrong"]

Document = TypeVar("Document", bound=BaseModel)

_LONGEST_SHOWN = 60


def parse_document(kind: type[Document], text: str, name: str) -> Document:
    """The document of that kind. Raises ValueError naming it, the field, its value and what is wrong with it."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{name}: {what_is_wrong(error)}") from None


def what_is_wrong(error: ValidationError) -> str:
    """The first fault: its field if it has one, what is wrong, and the value if it is a single one, cut short."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "json_invalid":
        where = "document"
    told = f"{where}: " if where else ""
    told += str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"] or not isinstance(first["input"], str | int | float | None):
        return told
    value = repr(first["input"])
    shown = value if len(value) <= _LONGEST_SHOWN else value[: _LONGEST_SHOWN - 3] + "..."
    return f"{told} (got {shown})"
