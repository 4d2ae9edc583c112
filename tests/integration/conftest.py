"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from forked_manager import ManagerZygote
from migrated_stores import migrated_url
from scripted_manager import ScriptedManager
from secure_world import IDLE_VM, SecureManager, secure_manager
from training_world import Zygote
from varuna_manager.db.engine import Database
from waiting import wait_until

torch.set_num_threads(1)  # two for so small a model, on cores that other tests use too, only wait for each other


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process from which the training tests fork their ranks."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureManager]:
    """A manager with --secure and two VMs whose processes do nothing: the tests send what their agents would."""
    flags = (
        "--agent-command",
        IDLE_VM,
        "--suspect-after-s",
        "3600",
        "--lost-after-s",
        "3600",
        "--request-timeout-s",
        "3600",
        "--max-body-bytes",
        "20000",
    )
    with secure_manager(tmp_path_factory.mktemp("secure"), "--vms", "2", *flags) as manager:
        wait_until(lambda: len(manager.vms()) == 2, "two VMs")
        yield manager


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """A manager's store, with all migrations and nothing in it."""
    store = Database(migrated_url(request, tmp_path))
    yield store
    await store.close()


@pytest.fixture(scope="session")
def manager_zygote() -> Iterator[ManagerZygote]:
    """The process from which managers are forked."""
    process = ManagerZygote()
    yield process
    process.close()


@pytest.fixture
async def manager(tmp_path: Path, manager_zygote: ManagerZygote) -> AsyncIterator[ScriptedManager]:
    running = ScriptedManager(tmp_path / "data", manager_zygote)
    yield running
    await running.close()
