"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from training_world import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process from which the training tests fork their ranks."""
    process = Zygote()
    yield process
    process.close()
