"""Unpacks archives in a process of the job's user (see `unpack.py`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import IO

from varuna_agent.logs import log_files
from varuna_agent.workers.spawn import Confinement, ProcessNotStartedError, start_guard

_UNPACK = Path(__file__).with_name("unpack.py")
_UNPACK_TIMEOUT_S = 1800.0
"""Enough for the largest archive on a slow disk."""


class NotUnpackedError(Exception):
    """The archive is refused, or cannot be written here; the text says why."""


async def unpack_archive(archive: IO[bytes], folder: Path, confinement: Confinement, log: Path) -> None:
    """Unpack it into a new folder that the job's user owns. Raises NotUnpackedError, OSError."""
    await asyncio.to_thread(_make_folder, folder, confinement)
    life_read, life_write = os.pipe()
    dev_null = os.open(os.devnull, os.O_WRONLY)
    try:
        guard = await start_guard(
            _UNPACK,
            [*confinement.guard_arguments, str(folder.absolute()), str(archive.fileno())],
            log=log,
            life_read=life_read,
            status_write=dev_null,
            inherited=[archive.fileno()],
            user=confinement.user,
        )
        waiting = asyncio.ensure_future(guard.wait())
        try:
            await asyncio.wait([waiting], timeout=_UNPACK_TIMEOUT_S)
        finally:
            in_time = waiting.done()
            os.close(life_write)
            life_write = -1
            code = await waiting
    except ProcessNotStartedError as error:
        raise NotUnpackedError(str(error)) from error
    finally:
        for descriptor in (life_read, dev_null, life_write):
            if descriptor >= 0:
                os.close(descriptor)
    if code != 0:
        output = await asyncio.to_thread(log_files.read_tail, log, lines=1)
        raise NotUnpackedError(
            output or f"code {code}" if in_time else f"it was not done within {_UNPACK_TIMEOUT_S:g} s"
        )


def _make_folder(folder: Path, confinement: Confinement) -> None:
    """Set its mode whatever the umask is. No other user can exchange the folder, because its parent is the agent's."""
    user = confinement.user
    folder.mkdir(mode=0o700)
    if user is None:
        folder.chmod(0o755)
    else:
        user.take_path(folder)
