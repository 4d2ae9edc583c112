"""Which script a job runs, where its command shows it for certain."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_SEVERAL_COMMANDS = re.compile(r"[;&|`\n]|\$\(")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_FLAGS = re.compile(r"-[bBdEiIOPqsSuvx]+")
"""Options of Python without a value."""
_SCRIPT = re.compile(r"[A-Za-z0-9_.,@+-][A-Za-z0-9_.,@+/-]*\.py")
"""A relative path that the shell leaves as it is."""


def find_script(run: str) -> str | None:
    """The relative path of the Python script that `run` starts; None: it starts something else, or that is unclear."""
    if _SEVERAL_COMMANDS.search(run.strip()):
        return None  # it may change the folder or make the script
    try:
        words = shlex.split(run, comments=True)
    except ValueError:
        return None
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    if not words or not _PYTHON.fullmatch(words.pop(0)):
        return None
    while words and _FLAGS.fullmatch(words[0]):
        words.pop(0)
    return words[0] if words and _SCRIPT.fullmatch(words[0]) else None


def is_missing(script: str, workdir: Path) -> bool:
    """Whether the script is not among the files that are copied. What is above the workdir, nobody knows here."""
    return ".." not in Path(script).parts and not (workdir / script).is_file()
