"""A job as text: YAML (or JSON, which is YAML too), and what is wrong with it, by line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.composer import ComposerError

from varuna_manager.domain.spec import JobSpec

_LONGEST_SHOWN = 60


class _PlainLoader(yaml.SafeLoader):
    """Takes no aliases: a few lines with them may stand for a document of any size, and the manager reads what users
    send."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            problem = f"the alias *{alias.anchor} is not taken here: write it out"
            raise ComposerError(None, None, problem, alias.start_mark)
        return super().compose_node(parent, index)


@dataclass(frozen=True, order=True)
class TextProblem:
    """`line`: from 1. `field`: the keys to it, joined by dots; empty: the whole text."""

    line: int
    field: str
    text: str


def read_job_text(text: str) -> tuple[JobSpec | None, list[TextProblem]]:
    """The job, or what is wrong with it, in the order of the lines.

    `copy_workdir: false` may stand in it as in a job file: nothing is sent along.
    """
    try:
        node = yaml.compose(text, Loader=_PlainLoader)
        document = yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        return None, [TextProblem(line, "", f"not valid YAML: {error.problem or error.context}")]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, [TextProblem(1, "", f"not valid YAML: {' '.join(str(error).split())}")]
    if not isinstance(node, yaml.MappingNode) or not isinstance(document, dict):
        return None, [TextProblem(1, "", "expected 'key: value' lines with at least name, workdir, run, global_batch")]
    copies = document.pop("copy_workdir", False)
    problems = list(_list_duplicates(node))
    if copies is not False:
        text = "a folder can only be sent along by varuna submit: set false, and workdir to a path that all VMs have"
        problems.append(TextProblem(_find_line(node, ("copy_workdir",)), "copy_workdir", text))
    spec = None
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        for flaw in error.errors(include_url=False, include_context=False):
            where = tuple(str(part) for part in flaw["loc"])
            text = _describe_flaw(flaw["type"], where, flaw["msg"], flaw["input"])
            problems.append(TextProblem(_find_line(node, where), ".".join(where), text))
    return (None if problems else spec), sorted(problems)


def _describe_flaw(kind: str, where: tuple[str, ...], message: str, given: object) -> str:
    if kind == "extra_forbidden":
        siblings = _list_keys(JobSpec.model_json_schema(), where[:-1])
        meant = difflib.get_close_matches(where[-1], siblings, n=1)
        return f"unknown; did you mean {meant[0]}?" if meant else f"unknown; the keys are {', '.join(siblings)}"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    shown = repr(given)
    if kind == "string_type" and where[0] == "env":
        return f"{shown}: a variable is text: write it in quotes"
    shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[: _LONGEST_SHOWN - 3]}..."
    return f"{shown}: {message[0].lower()}{message[1:]}"


def _list_keys(schema: Mapping[str, Any], above: tuple[str, ...]) -> list[str]:
    """The settings that there are below `above`."""
    place = schema
    for part in above:
        place = place.get("properties", {}).get(part, {})
        if "$ref" in place:
            place = schema["$defs"][place["$ref"].rpartition("/")[2]]
    return [key for key in place.get("properties", ()) if key != "archive"]


def _list_duplicates(node: yaml.Node, above: tuple[str, ...] = ()) -> Iterator[TextProblem]:
    """Keys that are given more than once: YAML silently takes the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        where = (*above, str(key.value))
        if where[-1] in seen:
            yield TextProblem(key.start_mark.line + 1, ".".join(where), "is given twice: leave one")
        seen.add(where[-1])
        yield from _list_duplicates(value, where)


def _find_line(node: yaml.MappingNode, where: tuple[str, ...]) -> int:
    """The line of the innermost key of `where` that the text has."""
    line, found = 1, node
    for part in where:
        pair = next((pair for pair in found.value if pair[0].value == part), None)
        if pair is None:
            break
        line = pair[0].start_mark.line + 1
        if not isinstance(pair[1], yaml.MappingNode):
            break
        found = pair[1]
    return line
