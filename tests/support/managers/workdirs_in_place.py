"""Workdirs for workers that run in existing folders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from varuna_agent.folders.workdirs import WorkdirError, Workdirs


async def no_archives(sha256: str) -> AsyncIterator[bytes]:
    raise WorkdirError(f"there is no manager to ask for {sha256}")
    yield b""


def workdirs_in_place(folder: Path) -> Workdirs:
    return Workdirs(folder / "workdirs", no_archives)
