"""The settings of a job file: their JSON Schema, and what can be read off it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from varuna_manager.domain.spec import JobSpec as Model

Schema = Mapping[str, Any]

_FILE_SETTINGS = {
    "copy_workdir": {
        "type": "boolean",
        "default": True,
        "description": "whether the workdir is packed and copied to the VMs; false: it has the same path on every VM",
    },
    "workdir": {
        "type": "string",
        "default": ".",
        "description": "folder in which `run` starts; counts from the folder of the job file",
    },
    "name": {
        "type": "string",
        "description": "unique among the jobs that are not over; if left out: the name of the job file's folder",
    },
}
"""The settings in which a job file differs from the manager's document."""
KEYS = (*(key for key in Model.model_fields if key != "archive"), "copy_workdir")


@cache
def job_schema() -> Schema:
    """The JSON Schema of job files."""
    schema = Model.model_json_schema()
    properties = {key: value for key, value in schema["properties"].items() if key != "archive"} | _FILE_SETTINGS
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Varuna job",
        "description": "A job file for `varuna submit`.",
        "properties": properties,
        "required": ["run", "global_batch"],
    }


def split_key(key: str) -> tuple[str, ...]:
    """`resources.max_gpus` as ("resources", "max_gpus"). The name of a variable or label may contain dots."""
    path: list[str] = []
    rest, place = key, job_schema()
    while rest and not _is_open(place):
        head, _, rest = rest.partition(".")
        path.append(head)
        place = _find_setting(place, head)
    return (*path, rest) if rest else tuple(path)


def is_text(path: Sequence[str]) -> bool:
    """Whether the setting's value is text."""
    return "string" in _kinds(_find_place(path))


def may_be_null(path: Sequence[str]) -> bool:
    return "null" in _kinds(_find_place(path))


def render_unknown_key(path: Sequence[str]) -> str:
    """What to do about a key that is no setting."""
    *above, key = path
    siblings = tuple(_find_place(above).get("properties", ()))
    meant = difflib.get_close_matches(key, siblings, n=1)
    if not meant:  # the right key at the wrong place
        places = {place[-1]: ".".join(place) for place in _list_paths(job_schema()) if place[:-1] != tuple(above)}
        meant = [places[name] for name in difflib.get_close_matches(key, places, n=1)]
    hint = f"did you mean {meant[0]}?" if meant else f"the keys are {', '.join(siblings)}"
    return f"unknown; {hint}"


def _find_place(path: Sequence[str]) -> Schema:
    place: Schema = job_schema()
    for part in path:
        place = place["additionalProperties"] if _is_open(place) else _find_setting(place, part)
    return place


def _find_setting(place: Schema, key: str) -> Schema:
    """The schema of the setting; an empty one if there is no such setting."""
    found: Schema = place.get("properties", {}).get(key, {})
    reference = found.get("$ref")
    return job_schema()["$defs"][reference.rpartition("/")[2]] if reference else found


def _is_open(place: Schema) -> bool:
    """Whether its keys are the user's: variables, labels."""
    return isinstance(place.get("additionalProperties"), Mapping)


def _kinds(place: Schema) -> list[str]:
    return [str(each.get("type")) for each in place.get("anyOf", [place])]


def _list_paths(place: Schema, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key in place.get("properties", ()):
        yield (*above, key)
        yield from _list_paths(_find_setting(place, key), (*above, key))
