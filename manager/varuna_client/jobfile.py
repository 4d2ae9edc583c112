"""Job files: YAML in, the job's document for the manager out, or what is wrong with it and in which line."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import ValidationError

from varuna_client.api import Client
from varuna_client.documents import Job, JobSpec
from varuna_client.errors import UserError
from varuna_client.workdir import pack
from varuna_manager.domain.spec import JobSpec as Model

_OURS = {
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
"""What a job file says otherwise than the manager's document."""
KEYS = (*(key for key in Model.model_fields if key != "archive"), "copy_workdir")


@dataclass(frozen=True, kw_only=True)
class JobFile:
    spec: JobSpec
    """Of a job that runs in its workdir, which is the same on every VM."""
    copies_workdir: bool
    """Whether the workdir is to be packed and sent to the VMs instead."""


@dataclass(frozen=True, order=True)
class Problem:
    """Something in a job file that the manager would not take."""

    line: int
    """From 1."""
    where: str
    """The keys that lead to it, with dots between them; empty: the whole file."""
    text: str

    def __str__(self) -> str:
        text = f"{self.where}: {self.text}" if self.where else self.text
        # YAML's escapes can make half a character, and a NUL.
        return text.replace("\0", r"\0").encode(errors="backslashreplace").decode()


class JobFileError(UserError):
    """`problems` has all that was found, in the order of their lines."""

    def __init__(self, path: Path, problems: Sequence[Problem]) -> None:
        first, more = problems[0], len(problems) - 1
        rest = f" (and {more} more: varuna validate {path})" if more else ""
        super().__init__(f"job file {path}:{first.line}: {first}{rest}")
        self.problems = tuple(problems)


def load_job(path: Path) -> JobFile:
    """The job that a file describes. Its `workdir` counts from the file's folder, which is also the default.

    Raises UserError, in one line, for a file that cannot be read; JobFileError for one that makes no job.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"cannot read job file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"job file {path} is not text: give a YAML file with at least run and global_batch") from error
    node, document = _parsed(path, text)
    folder = path.resolve().parent
    document = dict(document)
    copies = document.pop("copy_workdir", True)
    workdir = document.get("workdir") or "."
    spec = {"name": folder.name, **document, "workdir": _resolved(folder / str(workdir))}
    problems = list(_twice(node))
    if not isinstance(copies, bool):
        problems.append(_problem(node, ("copy_workdir",), f"{copies!r} is neither true nor false"))
    if not isinstance(workdir, str) or not Path(spec["workdir"]).is_dir():
        problems.append(_problem(node, ("workdir",), f"{spec['workdir']} is not a folder"))
    problems += _flaws(node, spec)
    if problems:
        raise JobFileError(path, sorted(problems))
    return JobFile(spec=spec, copies_workdir=copies)


def _resolved(path: Path) -> str:
    """As it is, where it has characters that no path has: then it is no folder either."""
    try:
        return str(path.resolve())
    except ValueError:
        return str(path)


def job_schema() -> dict[str, Any]:
    """The JSON Schema of job files."""
    schema = Model.model_json_schema()
    properties = {key: value for key, value in schema["properties"].items() if key != "archive"} | _OURS
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Varuna job",
        "description": "A job file for `varuna submit`.",
        "properties": properties,
        "required": ["run", "global_batch"],
    }


def _report_left_out(left_out: Sequence[str]) -> None:
    named, more = ", ".join(left_out[:3]), len(left_out) - 3
    typer.echo(f"varuna: workdir: left out {named}" + (f" and {more} more" if more > 0 else ""), err=True)


def hand_in(client: Client, job: JobFile) -> Job:
    """Submit the job, its workdir first where that is to be copied and the manager does not have it."""
    spec = job.spec
    if job.copies_workdir:
        with tempfile.TemporaryFile(prefix="varuna-workdir-") as file:
            packed = pack(Path(spec["workdir"]), file)
            if packed.left_out:
                _report_left_out(packed.left_out)
            if not client.has_archive(packed.sha256):
                file.seek(0)
                client.upload_archive(packed.sha256, file)
        spec = {**spec, "archive": packed.sha256}
    return client.submit(spec)


# ---------------------------------------------------------------- what is wrong, and where


def _parsed(path: Path, text: str) -> tuple[yaml.MappingNode, Mapping[str, Any]]:
    """The file with the places of its values, and the values. Raises JobFileError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise JobFileError(path, [Problem(line, "", f"not valid YAML: {error.problem or error.context}")]) from error
    except yaml.YAMLError as error:
        raise JobFileError(path, [Problem(1, "", f"not valid YAML: {' '.join(str(error).split())}")]) from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(document, dict):
        expected = "expected 'key: value' lines with at least run and global_batch"
        raise JobFileError(path, [Problem(1, "", expected)])
    return node, document


def _flaws(node: yaml.MappingNode, spec: Mapping[str, Any]) -> Iterator[Problem]:
    """What the manager's own model says against it."""
    if "archive" in spec:  # made of the workdir here
        yield _problem(node, ("archive",), _unknown("archive"))
    try:
        Model.model_validate({key: value for key, value in spec.items() if key != "archive"})
    except ValidationError as error:
        for flaw in error.errors():
            where = tuple(str(part) for part in flaw["loc"])
            yield _problem(node, where, _flaw_text(flaw["type"], where, flaw["msg"], flaw["input"]))


def _flaw_text(kind: str, where: tuple[str, ...], message: str, given: object) -> str:
    if kind == "extra_forbidden":
        return _unknown(where[-1]) if len(where) == 1 else "there is no such setting"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    shown = repr(given)
    if kind == "string_type" and where[0] == "env":
        return f"{shown}: a variable is text: write it in quotes"
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'}: {message[0].lower()}{message[1:]}"


def _unknown(key: str) -> str:
    meant = difflib.get_close_matches(key, KEYS, n=1)
    hint = f"did you mean {meant[0]}?" if meant else f"it may say {', '.join(KEYS)}"
    return f"unknown; {hint}"


def _twice(node: yaml.Node, above: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Keys that are given more than once: YAML would silently take the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        where = (*above, str(key.value))
        if key.value in seen:
            yield Problem(key.start_mark.line + 1, ".".join(where), "is given twice: leave one")
        seen.add(key.value)
        yield from _twice(value, where)


def _problem(node: yaml.MappingNode, where: tuple[str, ...], text: str) -> Problem:
    """With the line of the innermost key that the file has."""
    line, found = 1, node
    for part in where:
        pair = next((pair for pair in found.value if pair[0].value == part), None)
        if pair is None:
            break
        line = pair[0].start_mark.line + 1
        if not isinstance(pair[1], yaml.MappingNode):
            break
        found = pair[1]
    return Problem(line, ".".join(where), text)
