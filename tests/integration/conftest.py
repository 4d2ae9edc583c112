"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from training_world import Zygote

torch.set_num_threads(1)  # two for so small a model, on cores that other tests use too, only wait for each other


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process from which the training tests fork their ranks."""
    process = Zygote()
    yield process
    process.close()
