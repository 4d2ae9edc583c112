"""What several commands of the `varuna` command share: options, the client, output as text or JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from varuna_client.api import DEFAULT_URL, Client
from varuna_client.credentials import find_access

PLAIN_WIDTH = 160
"""Columns when the output is no terminal: wide enough that a reason is not folded."""

ManagerUrl = Annotated[
    str, typer.Option("--manager-url", envvar="VARUNA_MANAGER_URL", help="Address of the manager's REST API.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name or id.")]

__all__ = ["DEFAULT_URL", "AsJson", "JobName", "ManagerUrl", "connect", "emit", "emit_line", "make_console"]


def connect(url: str) -> Client:
    """A client with the token and the authority of the environment or the configuration file."""
    access = find_access()
    if url == DEFAULT_URL and access.manager_url is not None:
        url = access.manager_url
    return Client(url, token=access.token, ca=access.ca)


def make_console(*, stderr: bool = False) -> Console:
    """For standard output (or error) as it is now."""
    out = Console(highlight=False, stderr=stderr)
    return out if out.is_terminal else Console(highlight=False, stderr=stderr, width=PLAIN_WIDTH)


def emit(document: Any, text: RenderableType, as_json: bool) -> None:
    """The document as indented JSON, or its text for people."""
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        make_console().print(text, soft_wrap=True)


def emit_line(document: Any, text: RenderableType, as_json: bool) -> None:
    """One of many: JSON on one line each, so that a stream stays parseable."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        make_console().print(text, soft_wrap=True)
