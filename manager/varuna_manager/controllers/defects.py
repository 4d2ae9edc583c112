"""Errors in the handling of one job: logged, so that they do not affect the other jobs."""

from __future__ import annotations

from collections import OrderedDict

import structlog

_REMEMBERED = 1000


class Defects:
    """Logs each error once, because it recurs with every look."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, str] = OrderedDict()
        """The text of the last error, by job."""
        self._log = structlog.get_logger("varuna.controller")

    def log_once(self, job_id: str, text: str, error: Exception) -> None:
        if self.known.get(job_id) == repr(error):
            return
        self.known[job_id] = repr(error)
        while len(self.known) > _REMEMBERED:
            self.known.popitem(last=False)
        self._log.error(text, job=job_id, exc_info=error)
