"""Settings of a job file that are given on the command line: `--set`, `--env` and `--name`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from varuna_client.errors import UserError
from varuna_client.jobfile.schema import is_text, may_be_null, split_key

_LONGEST_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Override:
    """One setting, which replaces the job file's."""

    option: str
    """The option as messages show it."""
    path: tuple[str, ...]
    value: Any


def parse_overrides(settings: Sequence[str], variables: Sequence[str], name: str | None) -> Iterator[Override]:
    """`settings`: of --set, KEY=VALUE with KEY such as resources.max_gpus. `variables`: of --env, NAME=VALUE.

    A value is YAML, as in the file, except that text needs no quotes. Raises UserError.
    """
    if name is not None:
        yield Override(option=f"--name {name}", path=("name",), value=name)
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator or not all(key.split(".")):
            raise UserError(f"--set {text!r}: expected KEY=VALUE, such as resources.max_gpus=4")
        shown = text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
        path = split_key(key)
        yield Override(option=f"--set {shown}", path=path, value=_parse_value(path, value))
    for text in variables:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise UserError(f"--env {key!r}: expected NAME=VALUE")
        yield Override(option=f"--env {key}", path=("env", key), value=value)  # its value may be a secret


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """The job file's document with the overrides. Raises UserError if one is below a value that has no keys."""
    changed = dict(document)
    for override in overrides:
        place = changed
        *above, key = override.path
        for depth, part in enumerate(above, start=1):
            inner = place.get(part)
            if inner is not None and not isinstance(inner, Mapping):
                where = ".".join(above[:depth])
                raise UserError(f"{override.option}: {where} is {inner!r} in the job file, which has no keys")
            place[part] = dict(inner or {})
            place = place[part]
        place[key] = override.value
    return changed


def find_sources(overrides: Sequence[Override], where: str) -> list[Override]:
    """The overrides that set what is at the path of keys `where`, a part of it, or what it is a part of."""
    keys = {".".join(override.path): override for override in overrides}
    return [
        override
        for key, override in keys.items()
        if not where or key == where or key.startswith(f"{where}.") or where.startswith(f"{key}.")
    ]


def _parse_value(path: tuple[str, ...], text: str) -> Any:
    if is_text(path):
        return None if text == "null" and may_be_null(path) else text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"--set {'.'.join(path)}={text}: {text!r} is not a YAML value: quote it") from None
