"""The modules of an example, as its scripts import them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from repository import ROOT

__all__ = ["BERT", "GPT", "example_modules"]

_EXAMPLES = ROOT / "examples"
BERT, GPT = _EXAMPLES / "bert", _EXAMPLES / "gpt"


@contextmanager
def example_modules(patch: pytest.MonkeyPatch, folder: Path, *names: str) -> Iterator[dict[str, ModuleType]]:
    """Imports these modules from `folder`. When the block ends, every module that was loaded from there is unloaded."""
    patch.syspath_prepend(str(folder))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)
