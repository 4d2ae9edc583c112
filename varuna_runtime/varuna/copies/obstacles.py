"""Why a generation keeps no copies that it was to keep: what one rank finds, all ranks know and report."""

from __future__ import annotations

from contextlib import suppress

import structlog
import torch.distributed as dist

from varuna.distributed.rendezvous_store import read_values
from varuna.worker.worker import WorkerProcess

__all__ = ["CopiesObstacle"]

_log = structlog.get_logger("varuna")


class CopiesObstacle:
    """The one of a generation. All ranks make one of the same name; the first that finds something says it."""

    def __init__(self, worker: WorkerProcess, name: str, what: str) -> None:
        """`what`: the copies, as in "no copies of shares are kept"."""
        self._store, self._rank = worker.rendezvous.store, worker.environment.rank
        self._key, self._what = f"{name}/obstacle", what
        self._text = ""

    def report(self, reason: str) -> None:
        """This rank is the reason why nobody keeps them."""
        _log.warning(f"no {self._what} are kept: {reason}")
        self._text = f"rank {self._rank}: {reason}"
        with suppress(dist.DistError):  # rank 0 is gone, which this worker learns otherwise
            self._store.set(self._key, self._text)

    def read(self) -> str:
        """Why the generation keeps none; empty: no rank has said so yet. Asks the store as long as nothing is known."""
        if not self._text and (found := read_values(self._store, [self._key])):
            self._text = found[0]
        return self._text
