"""Writes docs/cli.md from the commands themselves: `python -m varuna_client.reference.cli > docs/cli.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from varuna_client.cli import app
from varuna_client.commands.setup_commands import PROGRAM
from varuna_client.errors import EXIT_CODES

_HEAD = """\
# The `varuna` command

Written by `make docs` from the command itself. `varuna COMMAND --help` prints the same.

## Output

In a terminal, commands print tables and colours and fit them to its width. In a pipe or a file they print plain text:
no colours, nothing folded or cut, a row on each line. `--json` prints the document that the manager answers with
([REST](rest.md)); what comes bit by bit (`events`, `logs`, `cancel`, `--watch`) is a document on each line.
`NO_COLOR=1` turns colours off, `FORCE_COLOR=1` keeps them in a pipe. What is not output (remarks, errors) goes to
standard error; an error is one line that says what to do.

## Exit codes

{codes}

`submit --watch`, `retry --watch` and `watch` end as their job does. `logs -f` does so when it fails. Ctrl-C ends the
command, and leaves the job running.

## Settings

Flags beat environment variables, these beat the configuration file; `varuna config` shows what holds and whence.

| flag | variable | in the file | |
| --- | --- | --- | --- |
| `--manager-url` | `VARUNA_MANAGER_URL` | `manager_url` | `http://127.0.0.1:8750` if none is given |
| `--token-file` (before the command) | `VARUNA_TOKEN_FILE` | `token_file` | a file with your token |
| none: arguments can be read by others | `VARUNA_TOKEN` | `token` | the token |
| `--ca` (before the command) | `VARUNA_CA` | `ca` | PEM file of the authority of the manager's certificate |

The file is `~/.config/varuna/config.toml` (`$XDG_CONFIG_HOME/varuna/config.toml`, or the path in `VARUNA_CONFIG`):

```toml
manager_url = "https://manager.example.com:8750"
token_file = "~/.config/varuna/token"
ca = "~/.config/varuna/ca.pem"
```

## Completion

Of commands, options, jobs and VMs:

| shell | in its start file |
| --- | --- |
| bash | `source <(varuna completion bash)` |
| zsh | `source <(varuna completion zsh)` |
| fish | `varuna completion fish \\| source` |

## Commands
"""
_PASSED_ON = ("manager", "agent", "export")
"""Commands with options of their own."""


def page() -> str:
    """The page's text."""
    codes = "\n".join(["| code | |", "| --- | --- |", *(f"| {code} | {text} |" for code, text in EXIT_CODES.items())])
    parts = [_HEAD.replace("{codes}", codes)]
    for name, command in _commands(typer.main.get_command(app)):
        parts.append(_section(name, command))
    return "\n".join(parts)


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        whole = f"{above} {name}".strip()
        if hasattr(command, "commands"):
            yield from _commands(command, whole)
        else:
            yield whole, command


def _section(name: str, command: Any) -> str:
    context = typer.Context(command, info_name=name)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = [_usage(each) for each in arguments]
    where = len(words) if command.context_settings.get("allow_interspersed_args", True) else 0
    words.insert(where, "[OPTIONS]")
    usage = " ".join([PROGRAM, name, *words])
    lines = [f"### varuna {name}", "", f"`{usage}`", "", _cell(command.help or "")]
    records = [each.get_help_record(context) for each in command.params]
    rows = [(names, text) for names, text in filter(None, records) if text]
    if rows and name not in _PASSED_ON:
        lines += ["", "| | |", "| --- | --- |"]
        lines += [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in rows]
    return "\n".join([*lines, ""])


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _cell(text: str) -> str:
    """On one line, and no table's border in it."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


if __name__ == "__main__":
    typer.echo(page(), nl=False)
