"""Defects that one job brings to light: logged, and kept away from the others."""

from __future__ import annotations

from collections import OrderedDict

import structlog

_REMEMBERED = 1000


class Defects:
    """Logs each once: it comes again with every look."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, str] = OrderedDict()
        """By job, the last one's text."""
        self._log = structlog.get_logger("varuna.controller")

    def log(self, job_id: str, text: str, error: Exception) -> None:
        if self.known.get(job_id) == repr(error):
            return
        self.known[job_id] = repr(error)
        while len(self.known) > _REMEMBERED:
            self.known.popitem(last=False)
        self._log.error(text, job=job_id, exc_info=error)
