"""What the commands share: options, the client, output as text or JSON."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from varuna_client.config import find_config
from varuna_client.errors import VarunaError
from varuna_client.rest.client import DEFAULT_URL, AsyncClient, Client

PLAIN_WIDTH = 160
"""Columns of the demo's screens when the output is not a terminal."""
_NO_LIMIT = 10_000
"""Columns of plain output, in which each row is one line."""
_COMPLETION_S = 2.0
_COMMANDS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""The characters that begin a terminal's commands: all control characters but tab and line feed."""

__all__ = [
    "DEFAULT_URL",
    "AsJson",
    "JobName",
    "JobNames",
    "ManagerUrl",
    "VmName",
    "complete_job",
    "complete_vm",
    "connect",
    "connect_async",
    "make_console",
    "print_document",
    "print_error",
    "print_line",
    "print_note",
]


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Names of jobs with their states, for the shell's completion; empty if no manager answers."""
    try:
        with connect(None, timeout_s=_COMPLETION_S, retries=0) as client:
            jobs = client.jobs(limit=100)
    except VarunaError:
        return []
    newest = {job["name"]: job["state"] for job in reversed(jobs)}
    return [(name, state) for name, state in newest.items() if name.startswith(incomplete)]


def complete_vm(incomplete: str) -> list[tuple[str, str]]:
    """Ids of VMs for the shell's completion."""
    try:
        with connect(None, timeout_s=_COMPLETION_S, retries=0) as client:
            found = client.vms(text=incomplete or None)
    except VarunaError:
        return []
    return [(vm["id"], vm["state"]) for vm in found if vm["id"].startswith(incomplete)]


ManagerUrl = Annotated[
    str | None,
    typer.Option(
        "--manager-url", help=f"Address of the manager's REST API (or set VARUNA_MANAGER_URL); {DEFAULT_URL} if none."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; a stream has one document per line.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name or id.", autocompletion=complete_job)]
JobNames = Annotated[
    list[str],
    typer.Argument(metavar="JOB...", help="The jobs' names or ids.", autocompletion=complete_job, show_default=False),
]
VmName = Annotated[
    str, typer.Argument(metavar="VM", help="The VM's id (varuna vms lists them).", autocompletion=complete_vm)
]


def connect(url: str | None, *, timeout_s: float = 15.0, retries: int = 2) -> Client:
    """A client for the manager at `url`; other settings come from the environment or the configuration file."""
    config = find_config({"manager_url": url})
    assert config.manager_url.value is not None, "it has a default"
    return Client(
        config.manager_url.value, token=config.token.value, ca=config.ca.value, timeout_s=timeout_s, retries=retries
    )


def connect_async(url: str | None) -> AsyncClient:
    """As `connect`, with asynchronous calls."""
    config = find_config({"manager_url": url})
    assert config.manager_url.value is not None, "it has a default"
    return AsyncClient(config.manager_url.value, token=config.token.value, ca=config.ca.value)


class _Console(Console):
    """Shows texts as they are. Scripts, VMs and callers write some of them: no bracket in them is a style, no word
    between colons is a picture, and no character is a command to the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            # Segments with `control` are rich's own commands.
            yield segment if segment.control else segment._replace(text=segment.text.translate(_COMMANDS))


def make_console(*, stderr: bool = False) -> Console:
    """A console for the present standard output (or error)."""
    out = _Console(stderr=stderr)
    return out if out.is_terminal else _Console(stderr=stderr, width=PLAIN_WIDTH)


def render_plain(text: RenderableType) -> str:
    """Render as plain text, without colours, folding or cutting."""
    out = io.StringIO()
    _Console(file=out, width=_NO_LIMIT, color_system=None, force_terminal=False).print(text)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def print_text(text: RenderableType) -> None:
    """Print for people: fitted to the terminal, or as plain text to a file or another command."""
    console = make_console()
    if console.is_terminal:
        console.print(text)
    else:
        sys.stdout.write(render_plain(text))
        sys.stdout.flush()


def print_note(text: str) -> None:
    """Print a remark on standard error."""
    make_console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def print_error(error: VarunaError) -> None:
    """Print an error on standard error, as one line."""
    typer.echo(f"varuna: {error}", err=True)


def print_document(document: Any, text: RenderableType, as_json: bool) -> None:
    """Print the document as indented JSON, or its text."""
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        print_text(text)


def print_line(document: Any, text: RenderableType, as_json: bool) -> None:
    """Print one document of a stream: as JSON on one line, or its text."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        print_text(text)
