"""The manager is light: no torch, and no numba before a plan is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from waiting import DEADLINE_S

pytestmark = pytest.mark.processes


def test_importing_the_manager_loads_neither_torch_nor_numba() -> None:
    code = "import sys, varuna_manager.main; print(sorted({'torch', 'numba', 'varuna'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.strip() == "[]"
