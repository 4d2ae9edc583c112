"""The corpus that every machine with Python and NumPy has: the documentation in their own modules.

One document for each module (its docstrings, in the order of the source) and for each topic of Python's language
reference (`pydoc_data`). The same versions give the same text. About 4 MB.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from corpus_reading import Document

# Tests document nothing; the others are vendored packages.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "ensurepip", "_vendor", "pydoc_data"}
_DOCTEST = re.compile(r"\s*(>>>|\.\.\.)")
_RULE = re.compile(r"[\s\W_]*$")  # underlines of headings, borders of tables


def python_documents() -> Iterator[Document]:
    """The documents of this machine's Python and NumPy. Names: `json.decoder`, `numpy.linalg._linalg`, `topic:with`."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for topic, text in sorted(topics.items()):
        yield Document(name=f"topic:{topic}", text=_prose(text))
    yield from module_documents(Path(sysconfig.get_paths()["stdlib"]))
    yield from module_documents(Path(np.__file__).parent, prefix="numpy.")


def python_fingerprint() -> str:
    """What the text of `python_documents` depends on."""
    return f"python {platform.python_version()}, numpy {importlib.metadata.version('numpy')}"


def module_documents(root: Path, prefix: str = "") -> Iterator[Document]:
    """One document of docstrings for each module below `root` that has any, by name. Raises ValueError for none."""
    found = False
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _LEFT_OUT.intersection(inside.parts):
            continue
        found = True
        text = "\n\n".join(_prose(docstring) for docstring in _docstrings(path))
        if text.strip():
            name = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
            yield Document(name=prefix + name, text=text)
    if not found:
        raise ValueError(f"no .py file in {root}: install Python's standard library sources, or give an --input")


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old escapes in third-party sources
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return  # some files of the library are templates, or for another version
    yield from _docstrings_of(tree)


def _docstrings_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if docstring:
        yield docstring
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_of(inner)


def _prose(text: str) -> str:
    """The text without sessions of the interpreter and rules of dashes. Blank lines stay: they end paragraphs."""
    kept = []
    for line in text.splitlines():
        if not line.strip():
            kept.append("")
        elif not _DOCTEST.match(line) and not _RULE.match(line):
            kept.append(line)
    return "\n".join(kept)
