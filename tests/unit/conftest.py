"""Tests of this folder start no process, so that `make unit` is quick; those that must are marked."""

from __future__ import annotations

import os
import subprocess
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts a process without the mark `processes`."""
    if request.node.get_closest_marker("processes") is not None:
        return

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        pytest.fail(f"starts a process ({arguments[1:2] or arguments}): mark the test with `processes`, or move it")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    for name in ("fork", "posix_spawn"):
        monkeypatch.setattr(os, name, refuse)
