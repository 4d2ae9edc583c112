"""Agent processes, which end with their test."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from agent_world import FakeManager, ended
from isolated_agent import IsolatedAgent


@pytest_asyncio.fixture
async def agents() -> AsyncIterator[list[asyncio.subprocess.Process]]:
    started: list[asyncio.subprocess.Process] = []
    yield started
    for agent in started:
        if agent.returncode is None:  # the number of one that has ended may be another process's by now
            with suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGKILL)
            await ended(agent)  # nothing of it is left to close when its event loop has gone


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own are closed to other users on the way."""
    folder = Path(tempfile.mkdtemp(prefix="varuna-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a killed agent's worker may still write its last


@pytest_asyncio.fixture
async def agent(folder: Path, agents: list[asyncio.subprocess.Process]) -> AsyncIterator[IsolatedAgent]:
    # An agent takes five intervals without a word for silence, and hangs up: a command on its way would be lost.
    manager = FakeManager(heartbeat_interval_s=10.0)
    await manager.start()
    yield IsolatedAgent(manager, agents, folder)
    await manager.stop()
