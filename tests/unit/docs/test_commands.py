"""Every command in the docs, in blocks and within sentences, exists and has the options shown.

Those in `console` blocks are also run: tests/e2e/test_readme.py.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from repository import ROOT
from varuna_client.cli import app
from varuna_client.commands.setup_commands import PROGRAM
from waiting import DEADLINE_S

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])
BLOCK = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:varuna|python) [^`]+)`(?!`)")
OPTION = re.compile(r"(--[a-z][a-z0-9_-]*|-[a-zA-Z])(?:=.*)?")
SOURCES = {"agent": "agent/varuna_agent/main.py", "export": "varuna_runtime/varuna/checkpoint/export.py"}
"""The options of a command that has its own parser. The manager's come from its settings, so its help has them."""


def lines(text: str) -> Iterator[str]:
    for block in BLOCK.findall(text):
        yield from (line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines())
    yield from (inline.replace("\n", " ") for inline in INLINE.findall(BLOCK.sub("", text)))


def words_of(line: str) -> list[str]:
    """Of the first command in the line: program, arguments and options."""
    try:
        found = shlex.split(line, comments=True)
    except ValueError:  # a part of a sentence
        return []
    end = next((at for at, word in enumerate(found) if word in ("|", "&&", ">", "<", ";")), len(found))
    return [word.strip("[]") for word in found[:end]]


def commands(*programs: str) -> list[tuple[str, tuple[str, ...]]]:
    """(page, words behind the program) of all commands that begin with one of the programs, each once."""
    found = ((page.name, words_of(line)) for page in PAGES for line in lines(page.read_text()))
    return sorted({(page, tuple(words[1:])) for page, words in found if words and words[0] in programs})


def options(words: tuple[str, ...]) -> list[str]:
    return [match[1] for word in words if (match := OPTION.fullmatch(word))]


def before_script(words: tuple[str, ...]) -> tuple[str, ...]:
    """Without a script of the user's, and its arguments."""
    return words[: next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))]


@cache
def group() -> Any:
    return typer.main.get_command(app)


@cache
def own_options(name: str) -> str:
    """The text with the options of a command that passes them on."""
    if name in SOURCES:
        return (ROOT / SOURCES[name]).read_text()
    command = [sys.executable, "-m", "varuna_manager.main", "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout


def names_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


@pytest.mark.processes
def test_every_varuna_command_takes_its_options() -> None:
    tried = commands(PROGRAM, f".venv/bin/{PROGRAM}")
    assert len(tried) > 50
    for page, words in tried:
        command_line = f"{page}: varuna {' '.join(words)}"
        before = next((at for at, word in enumerate(words) if word in group().commands), None)
        if before is None:
            assert words[0] in ("COMMAND", "…", "...") or not [w for w in words if not w.startswith("-")], command_line
            continue
        name, rest = words[before], words[before + 1 :]
        if name == "manager" or name in SOURCES:
            assert all(option in own_options(name) for option in options(rest) if option != "--help"), command_line
            continue
        command = group().commands[name]
        if hasattr(command, "commands") and rest:
            assert rest[0] in command.commands, command_line
            command = command.commands[rest[0]]
        for option in options(before_script(rest)):
            assert option in names_of(command), f"{command_line}: no option {option}"


def scripts() -> list[tuple[str, tuple[str, ...]]]:
    return [(page, words) for page, words in commands("python", ".venv/bin/python") if words]


@pytest.mark.parametrize(("page", "words"), scripts(), ids=lambda value: " ".join(value)[:60])
def test_every_script_in_the_docs_is_there_and_knows_its_options(page: str, words: tuple[str, ...]) -> None:
    if words[0] == "-m":
        text = "".join(path.read_text() for path in module_files(words[1]))
    elif words[0].startswith(("benchmarks/", "examples/", "tests/")):
        assert (ROOT / words[0]).exists(), f"{page}: {words[0]}"
        text = "".join(path.read_text() for path in (ROOT / words[0]).parent.glob("*.py"))
    else:
        return  # a script of the user's
    for option in options(before_script(words[1:])):
        assert re.search(rf"[\"']{option}[\"']|{option[2:].replace('-', '_')}: ", text), f"{page}: {words}: {option}"


def module_files(module: str) -> list[Path]:
    """The module's file, and the files beside it that read its arguments."""
    if module.startswith("varuna"):
        folder = next(ROOT.glob(f"*/{module.split('.')[0]}"))
        return sorted(folder.rglob("*.py"))
    return []
