"""Notices of preemption, and where they come from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class Notice:
    """The provider takes the VM away at the deadline."""

    notice_id: str
    deadline_unix_s: float
    source: str

    def seconds_left(self, now_unix_s: float) -> float:
        return max(0.0, self.deadline_unix_s - now_unix_s)


@dataclass(frozen=True)
class NoticeCancellation:
    """The provider does not take the VM after all."""

    notice_id: str


class NoticeSource(Protocol):
    def watch_notices(self) -> AsyncIterator[Notice | NoticeCancellation]:
        """Yield notices as they arrive, without end; the same notice may come again."""
        ...

    async def acknowledge_notice(self, notice_id: str) -> None:
        """Let the provider take the VM now: everything is saved, and no worker runs there."""
        ...


class FileNoticeSource:
    """Polls for `{"id": ..., "deadline_unix_s": ...}` in a file; the local provider and tests write it."""

    def __init__(self, path: Path, poll_s: float) -> None:
        self._path = path
        self._poll_s = poll_s

    async def watch_notices(self) -> AsyncIterator[Notice]:
        last_text = ""
        while True:
            text = await asyncio.to_thread(self._read)
            if text and text != last_text:
                notice = parse_notice(text, source=f"file {self._path}")
                if notice is not None:
                    last_text = text
                    yield notice
            await asyncio.sleep(self._poll_s)

    async def acknowledge_notice(self, notice_id: str) -> None:
        """The writer of the file expects no acknowledgement."""

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            _log.warning("the notice file cannot be read", path=str(self._path), error=str(error))
            return ""


def parse_notice(text: str, *, source: str) -> Notice | None:
    """None if the text is not a notice, because it may be half written."""
    try:
        document = json.loads(text)
        return Notice(str(document["id"]), float(document["deadline_unix_s"]), source)
    except (ValueError, KeyError, TypeError):
        return None


def unix_now_s() -> float:
    """Wall-clock time, because the provider gives deadlines in it."""
    return time.time()
