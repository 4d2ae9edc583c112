"""Job files: YAML in, the job's document for the manager out, or a list of errors with their lines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import ValidationError

from varuna_client.errors import UserError
from varuna_client.jobfile.overrides import Override, apply_overrides, find_sources
from varuna_client.jobfile.schema import render_unknown_key
from varuna_client.jobfile.script import find_script, is_missing
from varuna_client.jobfile.workdir import pack
from varuna_client.rest.client import Client
from varuna_manager.domain.spec import JobSpec as Model
from varuna_proto.rest import JobDocument, JobSpecDocument


@dataclass(frozen=True, kw_only=True)
class JobFile:
    spec: JobSpecDocument
    """The job's document, as if the workdir had the same path on every VM."""
    copies_workdir: bool
    """Whether the workdir is packed and sent to the VMs instead."""


@dataclass(frozen=True, order=True)
class JobFileProblem:
    """An error in a job file, for which the manager would reject it."""

    line: int
    """From 1; 0: it is in an override."""
    where: str
    """The path of keys to it, joined by dots; empty: the whole file. In an override: the options."""
    text: str

    def __str__(self) -> str:
        text = f"{self.where}: {self.text}" if self.where else self.text
        # YAML's escapes can make half a character, and a NUL.
        return text.replace("\0", r"\0").encode(errors="backslashreplace").decode()


class JobFileError(UserError):
    """A job file with `problems`, in the order of their lines."""

    def __init__(self, path: Path, problems: Sequence[JobFileProblem]) -> None:
        first, more = problems[0], len(problems) - 1
        if first.line == 0:
            super().__init__(f"{first} (and {more} more)" if more else str(first))
        else:
            rest = f" (and {more} more: varuna validate {path})" if more else ""
            super().__init__(f"job file {path}:{first.line}: {first}{rest}")
        self.problems = tuple(problems)


def load_job(path: Path, overrides: Sequence[Override] = ()) -> JobFile:
    """Load a job file. Its `workdir` is relative to the file's folder, which is also the default.

    Raises UserError for a file that cannot be read; JobFileError for one that is not a valid job.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"cannot read job file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"job file {path} is not text: give a YAML file with at least run and global_batch") from error
    node, document = _parse_yaml(path, text)
    folder = path.resolve().parent
    job, problems = _check_document(node, folder, apply_overrides(document, overrides))
    if problems and overrides:
        _, own = _check_document(node, folder, document)
        problems = [problem if problem in own else _blame_overrides(problem, overrides) for problem in problems]
    if problems:
        raise JobFileError(path, sorted(problems))
    return job


def _check_document(
    node: yaml.MappingNode, folder: Path, given: Mapping[str, Any]
) -> tuple[JobFile, Sequence[JobFileProblem]]:
    """The job, and all that is wrong with it."""
    document = dict(given)
    copies = document.pop("copy_workdir", True)
    workdir = document.get("workdir") or "."
    spec = {"name": folder.name, **document, "workdir": _resolve_path(folder / str(workdir))}
    problems = list(_list_duplicate_keys(node))
    if not isinstance(copies, bool):
        problems.append(_make_problem(node, ("copy_workdir",), f"{copies!r} is neither true nor false"))
    if not isinstance(workdir, str) or not Path(spec["workdir"]).is_dir():
        problems.append(_make_problem(node, ("workdir",), f"{spec['workdir']} is not a folder"))
    elif copies is True and not spec.get("setup"):  # `setup` may make the script
        script = find_script(str(spec.get("run")))
        if script is not None and is_missing(script, Path(spec["workdir"])):
            text = f"{script} is not in the workdir {spec['workdir']}: correct its path, or workdir"
            problems.append(_make_problem(node, ("run",), text))
    problems += _list_model_errors(node, spec)
    return JobFile(spec=spec, copies_workdir=copies), problems


def _blame_overrides(problem: JobFileProblem, overrides: Sequence[Override]) -> JobFileProblem:
    """The problem with the options that it comes from as its place."""
    sources = find_sources(overrides, problem.where)
    if not sources:
        return problem
    is_said = problem.where in ("", *(".".join(source.path) for source in sources))
    options = ", ".join(source.option for source in sources)
    return JobFileProblem(0, options, problem.text if is_said else f"{problem.where}: {problem.text}")


def _resolve_path(path: Path) -> str:
    """Unchanged if it contains characters that no path may contain: it is then not a folder either."""
    try:
        return str(path.resolve())
    except ValueError:
        return str(path)


def _report_left_out(left_out: Sequence[str]) -> None:
    named, more = ", ".join(left_out[:3]), len(left_out) - 3
    typer.echo(f"varuna: workdir: left out {named}" + (f" and {more} more" if more > 0 else ""), err=True)


def submit_job(client: Client, job: JobFile) -> JobDocument:
    """Submit the job. First upload its workdir, if it is to be copied and the manager does not have it."""
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


# ---------------------------------------------------------------- errors and their places


def _parse_yaml(path: Path, text: str) -> tuple[yaml.MappingNode, Mapping[str, Any]]:
    """The file's YAML nodes, which know their lines, and its values. Raises JobFileError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise JobFileError(
            path, [JobFileProblem(line, "", f"not valid YAML: {error.problem or error.context}")]
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobFileError(path, [JobFileProblem(1, "", f"not valid YAML: {' '.join(str(error).split())}")]) from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(document, dict):
        expected = "expected 'key: value' lines with at least run and global_batch"
        raise JobFileError(path, [JobFileProblem(1, "", expected)])
    return node, document


def _list_model_errors(node: yaml.MappingNode, spec: Mapping[str, Any]) -> Iterator[JobFileProblem]:
    """The errors that the manager's own model finds in the job."""
    if "archive" in spec:  # this client makes it from the workdir
        yield _make_problem(node, ("archive",), render_unknown_key(("archive",)))
    try:
        Model.model_validate({key: value for key, value in spec.items() if key != "archive"})
    except ValidationError as error:
        for flaw in error.errors():
            where = tuple(str(part) for part in flaw["loc"])
            yield _make_problem(node, where, _render_model_error(flaw["type"], where, flaw["msg"], flaw["input"]))


def _render_model_error(kind: str, where: tuple[str, ...], message: str, given: object) -> str:
    if kind == "extra_forbidden":
        return render_unknown_key(where)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    shown = repr(given)
    if kind == "string_type" and where[0] == "env":
        return f"{shown}: a variable is text: write it in quotes"
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'}: {message[0].lower()}{message[1:]}"


def _list_duplicate_keys(node: yaml.Node, above: tuple[str, ...] = ()) -> Iterator[JobFileProblem]:
    """Keys that are given more than once: YAML silently takes the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        where = (*above, str(key.value))
        if key.value in seen:
            yield JobFileProblem(key.start_mark.line + 1, ".".join(where), "is given twice: leave one")
        seen.add(key.value)
        yield from _list_duplicate_keys(value, where)


def _make_problem(node: yaml.MappingNode, where: tuple[str, ...], text: str) -> JobFileProblem:
    """A problem at the line of the innermost key that the file has."""
    line, found = 1, node
    for part in where:
        pair = next((pair for pair in found.value if pair[0].value == part), None)
        if pair is None:
            break
        line = pair[0].start_mark.line + 1
        if not isinstance(pair[1], yaml.MappingNode):
            break
        found = pair[1]
    return JobFileProblem(line, ".".join(where), text)
