"""Reads a provider's settings from a YAML or TOML file into a pydantic model."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

__all__ = ["read_settings_file"]

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_settings_file(path: Path, model: type[ModelT]) -> ModelT:
    """Raises ValueError with one line that names the file, the field and the value. A name that ends with .toml means
    TOML, any other YAML."""
    kind, parse = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("YAML", yaml.safe_load)
    try:
        document: Any = parse(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not {kind}: it is no text in UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a mapping with {_list_fields(model)}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"{path}: {_render_first(error)}") from error


def _list_fields(model: type[BaseModel]) -> str:
    """The first fields that must be given."""
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    names = (required or list(model.model_fields))[:2]
    return ", ".join([*names, "..."])


def _render_first(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    is_short = first["type"] != "missing" and isinstance(first["input"], str | int | float | bool | None)
    value = f" {first['input']!r}" if is_short else ""
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"{place}{value}: {message}" if place else message
