"""What several commands of the `varuna` command share: options, the client, output as text or JSON."""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from varuna_client.api import DEFAULT_URL, AsyncClient, Client
from varuna_client.config import find_config
from varuna_client.errors import VarunaError

PLAIN_WIDTH = 160
"""Columns where the output is no terminal and must end somewhere: the demo's screens."""
_NO_LIMIT = 10_000
"""Columns of plain output: nothing is folded there, a line is a row."""
_COMPLETION_S = 2.0

__all__ = [
    "DEFAULT_URL",
    "AsJson",
    "JobName",
    "ManagerUrl",
    "VmName",
    "complete_job",
    "complete_vm",
    "connect",
    "connect_later",
    "emit",
    "emit_line",
    "make_console",
    "note",
]


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Names of jobs for the shell's completion, with their states; none when no manager answers."""
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; of what comes bit by bit, a document on each line.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name or id.", autocompletion=complete_job)]
VmName = Annotated[str, typer.Argument(metavar="VM", help="The VM's id: varuna vms.", autocompletion=complete_vm)]


def connect(url: str | None, *, timeout_s: float = 15.0, retries: int = 2) -> Client:
    """A client for the manager at `url`; what is not given comes from the environment or the configuration file."""
    config = find_config({"manager_url": url})
    assert config.manager_url.value is not None, "it has a default"
    return Client(
        config.manager_url.value, token=config.token.value, ca=config.ca.value, timeout_s=timeout_s, retries=retries
    )


def connect_later(url: str | None) -> AsyncClient:
    """As `connect`, with calls to be awaited."""
    config = find_config({"manager_url": url})
    assert config.manager_url.value is not None, "it has a default"
    return AsyncClient(config.manager_url.value, token=config.token.value, ca=config.ca.value)


def make_console(*, stderr: bool = False) -> Console:
    """For standard output (or error) as it is now."""
    out = Console(highlight=False, stderr=stderr)
    return out if out.is_terminal else Console(highlight=False, stderr=stderr, width=PLAIN_WIDTH)


def plain(text: RenderableType) -> str:
    """As plain text: no colours, nothing folded or cut."""
    out = io.StringIO()
    Console(file=out, highlight=False, width=_NO_LIMIT, color_system=None, force_terminal=False).print(text)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def tell(text: RenderableType) -> None:
    """For people: fitted to their terminal, or plain where it goes into a file or another command."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(text)
    else:
        sys.stdout.write(plain(text))
        sys.stdout.flush()


def note(text: str) -> None:
    """A remark beside the output, on standard error."""
    Console(highlight=False, stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def emit(document: Any, text: RenderableType, as_json: bool) -> None:
    """The document as indented JSON, or its text for people."""
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        tell(text)


def emit_line(document: Any, text: RenderableType, as_json: bool) -> None:
    """One of many: JSON on one line each, so that a stream stays parseable."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        tell(text)
