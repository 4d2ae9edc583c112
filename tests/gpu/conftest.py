"""The tests that need a CUDA device. Without one they are collected and skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from training_world import Zygote

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(needs_device)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """The zygote that starts the ranks."""
    process = Zygote()
    yield process
    process.close()
