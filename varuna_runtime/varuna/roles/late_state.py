"""The late state: what only the update of a step reads of a new stage. It comes while the passes of the step run.

A rank that has moved in the middle of a step can run its passes as soon as it has the parameters of its stage, and what
the sums of the step have. The optimizers' state and moving averages are two thirds of what it lacks or more, and are
not read before the update: they are fetched into host memory meanwhile.

Until all ranks have theirs, none has ended its move: a rank that leaves gives the state of the stage that it had. Each
holds that until the update, as in any move.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
import torch.distributed as dist

from varuna.checkpoint.format.manifest import FileEntry
from varuna.checkpoint.loading.reader import FileContent
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import GenerationEnded
from varuna.distributed.rendezvous_store import read_values
from varuna.worker.worker import WorkerProcess

__all__ = ["LateSource", "LateState", "may_be_late"]

_log = structlog.get_logger("varuna")

_COUNT, _ALL, _FAULT = "late state/count", "late state/all", "late state/fault"
"""In the generation's store: how many ranks have theirs; that all have; why one has not."""
_LOOK_S = 0.05
_SWITCH = "VARUNA_LATE_STATE"
"""`0` in the job's env: nothing is late. The same for all ranks."""


def may_be_late() -> bool:
    """Whether the job lets state come while passes run."""
    return os.environ.get(_SWITCH, "1") != "0"


class LateSource(Protocol):
    """A move whose stage has been taken for passes (`varuna.roles.moving.StageMove`)."""

    @property
    def bytes_for_update(self) -> int: ...

    def read_for_update(self) -> list[tuple[FileEntry, FileContent]]: ...

    def fill_for_update(self, files: Sequence[tuple[FileEntry, FileContent]]) -> None: ...

    def close(self) -> None: ...


class LateState:
    """One rank's. All ranks of a generation that moves in the middle of a step make one."""

    def __init__(self, worker: WorkerProcess, source: LateSource, end_move: Callable[[], None]) -> None:
        """Closes the `source` at the end. `end_move` is called, from another thread, when all ranks have their late
        state."""
        self._worker, self._departure, self._source = worker, worker.departure, source
        self._end_move = end_move
        self.bytes = source.bytes_for_update
        """That come from other ranks."""
        self._files: Sequence[tuple[FileEntry, FileContent]] = ()
        self._have_all = False
        """Whether all ranks have theirs."""
        self._is_left = False
        self._thread = threading.Thread(target=self._fetch, name="varuna-late-state", daemon=True)

    def begin(self) -> None:
        """Begins to fetch: this rank is connected with its new stage. Before, it could not go on with that, even if it
        were whole."""
        self._thread.start()

    def fill(self) -> None:
        """Waits until all ranks have theirs, and fills this rank's. Raises as a worker that leaves."""
        self._departure.wait_until(lambda: self._have_all)
        self._fill_now()

    def leave(self) -> None:
        """The generation has ended here: fills this rank's late state if all ranks had theirs. If not, it is of no use,
        and is not waited for."""
        with self._departure.condition:
            self._is_left = True
        if self._thread.ident is None:  # it has not begun
            self._source.close()
        if self._have_all:
            self._fill_now()

    def _fill_now(self) -> None:
        files, self._files = self._files, ()
        self._source.fill_for_update(files)

    def _fetch(self) -> None:
        began_s, fault = time.monotonic(), ""
        try:
            self._files = self._source.read_for_update()
        except Exception as error:  # a holder is gone, or memory is short
            fault = first_line(error) or type(error).__name__
        took_s = time.monotonic() - began_s
        with suppress(dist.DistError):  # rank 0 is gone, which this worker learns otherwise
            self._settle(fault)
        _log.info("the late state was fetched", bytes=self.bytes, seconds=round(took_s, 3), fault=fault)
        self._source.close()

    def _settle(self, fault: str) -> None:
        """Says that this rank has its late state, or its `fault`, until all have theirs or one says why it has not."""
        store = self._worker.rendezvous.store
        if fault:
            store.set(_FAULT, f"rank {self._worker.topology.rank}: {fault}")
        elif store.add(_COUNT, 1) == len(self._worker.topology.everyone):
            store.set(_ALL, "")
        while self._departure.exit_code is None and not self._is_left:
            if read_values(store, [_ALL]) is not None:
                self._end_wait()
                return
            if (faults := read_values(store, [_FAULT])) is not None:
                self._departure.leave_generation(GenerationEnded(f"state of a new stage did not come: {faults[0]}"))
                return
            time.sleep(_LOOK_S)

    def _end_wait(self) -> None:
        with self._departure.condition:
            if self._is_left:
                return
            self._have_all = True
            self._departure.condition.notify_all()
        self._end_move()
