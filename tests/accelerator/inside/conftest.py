"""Settings of the checks that run with the simulated accelerator loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import simulated
from training_world import Zygote

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_race() -> Iterator[None]:
    """Fails a test that leaves a race behind, and lets none start with another's."""
    torch.accelerator.synchronize()
    simulated.take_races()
    simulated.take_syncs()
    yield
    assert simulated.take_races() == []


@pytest.fixture
def device() -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()
