"""`varuna config` and `varuna completion`: the settings in force, and completion in the shell."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from varuna_client.commands.options import AsJson, ManagerUrl, print_document
from varuna_client.config import config_path, find_config
from varuna_client.text.render import table

PROGRAM = "varuna"
COMPLETION_VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def config(context: typer.Context, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Show the settings in force and their origins: flags, then environment, then file, then defaults."""
    flags = {**(context.parent.params if context.parent else {}), "manager_url": manager_url}
    found, path = find_config(flags), config_path()
    rows: dict[str, dict[str, str | None]] = {}
    for name, setting in (("manager_url", found.manager_url), ("token", found.token), ("ca", found.ca)):
        value = "vt1.…" if name == "token" and setting.value else setting.value
        rows[name] = {"value": value, "from": setting.origin}
    made = table("SETTING", "VALUE", "FROM", fold=("VALUE", "FROM"))
    for name, row in rows.items():
        made.add_row(name, row["value"] or "-", row["from"])
    there = "" if path.exists() else " (there is none; keys: manager_url, token, token_file, ca)"
    document: dict[str, Any] = {"file": {"path": str(path), "exists": path.exists()}, "settings": rows}
    print_document(document, Group(made, Text(f"file: {path}{there}", style="dim")), as_json)


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.")],
) -> None:
    """Print the completion for a shell: of commands, options, jobs and VMs. bash: source <(varuna completion bash)."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # no other name of typer's

    typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETION_VARIABLE, shell=shell.value))


def prepare_completion() -> None:
    """Let typer answer the shell's completion requests, although its own completion options are off."""
    if COMPLETION_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # as above

        completion_init()
