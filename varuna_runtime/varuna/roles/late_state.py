"""What is late at a move in the middle of a step: sums of gradients, and what only the update reads of a new stage.

A rank can run its passes as soon as it has the parameters of its stage. The sums of gradients that it gets of the step
under way are added to those of its own passes when they come, before any rank sums them over the replicas. The
optimizers' state and moving averages, two thirds of what it lacks or more, are not read before the update. All of that
is fetched into host memory while the passes run.

Until all ranks have what is late of the state, none has ended its move: a rank that leaves gives the state of the stage
that it had, and a new process has none to give. Each holds that until the update, as in any move. Where only sums are
late, the move is over: a rank that leaves without them has nothing of the step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
import torch.distributed as dist
from torch import Tensor

from varuna.checkpoint.format.manifest import FileEntry
from varuna.checkpoint.loading.reader import FileContent
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import GenerationEnded
from varuna.distributed.rendezvous_store import read_values
from varuna.roles.kept_shares import StepRest
from varuna.worker.worker import WorkerProcess

__all__ = ["LateSource", "LateState", "are_sums_late", "may_be_late"]

_log = structlog.get_logger("varuna")

_COUNT, _ALL, _FAULT = "late state/count", "late state/all", "late state/fault"
"""In the generation's store: how many ranks have theirs; that all have; why one has not."""
_LOOK_S = 0.05
_SWITCH = "VARUNA_LATE_STATE"
"""`0` in the job's env: nothing is late. The same for all ranks."""


def may_be_late() -> bool:
    """Whether the job lets state and sums come while passes run."""
    return os.environ.get(_SWITCH, "1") != "0"


def are_sums_late(rest: StepRest | None) -> bool:
    """Whether the sums that move for the rest of a step come while it runs. All ranks have a `rest` then, or none."""
    return rest is not None and rest.sums is not None and may_be_late()


class LateSource(Protocol):
    """A move whose stage has been taken for passes (`varuna.roles.moving`)."""

    @property
    def lacks_state(self) -> bool:
        """Whether the update reads what is not there yet."""
        ...

    @property
    def bytes_for_update(self) -> int: ...

    def read_sums(self) -> Sequence[Mapping[str, Tensor]]: ...

    def read_for_update(self) -> Sequence[tuple[FileEntry, FileContent]]: ...

    def fill_for_update(self, files: Sequence[tuple[FileEntry, FileContent]]) -> None: ...

    def close(self) -> None: ...


class LateState:
    """One rank's. All ranks of a generation that moves in the middle of a step make one."""

    def __init__(
        self,
        worker: WorkerProcess,
        source: LateSource,
        *,
        add_sums: Callable[[Iterable[Mapping[str, Tensor]]], None],
        end_move: Callable[[], None],
    ) -> None:
        """Closes the `source` at the end.

        `add_sums`: adds sums that have come to the gradients. `end_move`: called, from another thread, when all ranks
        have what is late.
        """
        self._worker, self._departure, self._source = worker, worker.departure, source
        self._add_sums, self._end_move = add_sums, end_move
        self.bytes = source.bytes_for_update
        """Of the state that comes from other ranks."""
        self.lacks_state = source.lacks_state
        """Whether some of the state is late."""
        self.has_lacked_state = self.lacks_state
        """Whether some was when this began. The same on all ranks, which fill theirs at different moments."""
        self._sums: Sequence[Mapping[str, Tensor]] | None = None
        """That have come; None: they have not."""
        self._has_sums = False
        """Whether they have been added."""
        self._files: Sequence[tuple[FileEntry, FileContent]] = ()
        self._have_all = False
        self._is_left = False
        self._filling = threading.Lock()
        self._thread = threading.Thread(target=self._fetch, name="varuna-late-state", daemon=True)

    def begin(self) -> None:
        """Begins to fetch: this rank is connected with its new stage. Before, it could not go on with that, even if it
        were whole."""
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        return self._thread.ident is not None

    def have_all(self) -> bool:
        """Whether all ranks have what is late, though it may not be in its place yet."""
        return self._have_all

    def add_sums(self) -> bool:
        """Adds the sums to the gradients, if they have come. Returns whether the gradients have them. Where the passes
        run."""
        if not self._has_sums and self._sums is not None:
            self._add_sums(self._sums)
            self._sums, self._has_sums = None, True
        return self._has_sums

    def wait_for_sums(self) -> None:
        """Waits for the sums, and adds them. Raises as a worker that leaves."""
        self._departure.wait_until(lambda: self._has_sums or self._sums is not None)
        self.add_sums()

    def fill(self) -> None:
        """Waits until all ranks have theirs, if some of the state is late, and fills this rank's. From any thread;
        raises as a worker that leaves."""
        if self.lacks_state:
            self._departure.wait_until(self.have_all)
            self._fill_now()

    def leave(self) -> bool:
        """The generation has ended here: puts in its place what is late and of use. What has not come is not waited
        for. Returns whether the gradients have the sums."""
        with self._departure.condition:
            self._is_left = True
        if not self.has_begun:
            self._source.close()
        if self.lacks_state and not self._have_all:
            return False
        self._fill_now()
        return self.add_sums()

    def _fill_now(self) -> None:
        with self._filling:
            if self.lacks_state:
                files, self._files = self._files, ()
                self._source.fill_for_update(files)
                self.lacks_state = False

    def _fetch(self) -> None:
        began_s, fault = time.monotonic(), ""
        try:
            self._take_sums(self._source.read_sums())
            self._files = self._source.read_for_update()
        except Exception as error:  # a holder is gone, or memory is short
            fault = first_line(error) or type(error).__name__
        took_s = time.monotonic() - began_s
        with suppress(dist.DistError):  # rank 0 is gone, which this worker learns otherwise
            self._settle(fault)
        _log.info("the late state was fetched", bytes=self.bytes, seconds=round(took_s, 3), fault=fault)
        self._source.close()

    def _take_sums(self, sums: Sequence[Mapping[str, Tensor]]) -> None:
        with self._departure.condition:
            self._sums = sums
            self._departure.condition.notify_all()

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
