"""Has archives unpacked by a process of the job's user (see `unpack.py`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import IO

from varuna_agent import logs
from varuna_agent.spawn import Confinement, ProcessNotStartedError, start_guard

_UNPACK = Path(__file__).with_name("unpack.py")
_MOST_S = 1800.0
"""For the largest archive on a slow disk."""


class NotUnpackedError(Exception):
    """The archive is refused, or cannot be written here; says why."""


async def unpack_archive(archive: IO[bytes], folder: Path, confinement: Confinement, log: Path) -> None:
    """Unpack it into a new folder, which is the job's user's. Raises NotUnpackedError, OSError."""
    await asyncio.to_thread(_make_folder, folder, confinement)
    life_read, life_write = os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        guard = await start_guard(
            _UNPACK,
            [*confinement.for_guard, str(folder.absolute()), str(archive.fileno())],
            log=log,
            life_read=life_read,
            status_write=nowhere,
            inherited=[archive.fileno()],
            user=confinement.user,
        )
        waiting = asyncio.ensure_future(guard.wait())
        try:
            await asyncio.wait([waiting], timeout=_MOST_S)
        finally:
            in_time = waiting.done()
            os.close(life_write)
            life_write = -1
            code = await waiting
    except ProcessNotStartedError as error:
        raise NotUnpackedError(str(error)) from error
    finally:
        for descriptor in (life_read, nowhere, life_write):
            if descriptor >= 0:
                os.close(descriptor)
    if code != 0:
        said = await asyncio.to_thread(logs.tail, log, lines=1)
        raise NotUnpackedError(said or f"code {code}" if in_time else f"it was not done within {_MOST_S:g} s")


def _make_folder(folder: Path, confinement: Confinement) -> None:
    """Whatever the umask. Nobody can exchange it: the folder around it is the agent's."""
    user = confinement.user
    folder.mkdir(mode=0o700)
    if user is None:
        folder.chmod(0o755)
    else:
        user.own(folder)
