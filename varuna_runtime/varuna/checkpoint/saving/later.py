"""When checkpoints are given up (`varuna.checkpoint.saving.given_up`): before the first step on a loaded state.

Several ranks may have loaded it, and one of them gives up for all. Which one does not matter, so it need not be rank 0,
which may be a new process by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import structlog
import torch

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.saving.given_up import find_later_folders, give_up_checkpoints
from varuna.checkpoint.storage.answers import ask_store
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import PeerLost
from varuna.worker.worker import WorkerProcess

__all__ = ["LaterCheckpoints"]

_log = structlog.get_logger("varuna")

_KEY = "varuna.give-up"


@dataclass(frozen=True, kw_only=True)
class _LoadedState:
    """The state that all ranks have loaded. Until a step is trained on it, nothing is given up for it."""

    number: str
    """Among the loads, the same on all ranks that took part."""
    step: int
    first_given_up: int
    """Checkpoints from this step on are given up with the next step."""
    is_chosen: bool
    """Whether the script has chosen it, and did not take the newest."""


class LaterCheckpoints:
    """Gives up those in the job's own store, as one rank of a generation, together with the others."""

    def __init__(self, worker: WorkerProcess, before: LaterCheckpoints | None = None) -> None:
        """`before`: of this process in the generation before; None: it is new."""
        self._worker = worker
        url = worker.environment.checkpoint_url
        self._store = CheckpointStore(url) if url else None
        self._loads = 0
        """In this generation."""
        self._loaded: _LoadedState | None = None if before is None else before._loaded
        self._is_mine: bool | None = None
        """Whether this process gives up checkpoints for the newest load; None: that is not decided yet."""

    def note_load(self, url: str, step: int) -> None:
        """The script has loaded the checkpoint of `step` in `url`. Called by all ranks."""
        if self._store is not None:
            # The job's own checkpoint of the same step has another state than one from elsewhere.
            is_own = CheckpointStore(url).url == self._store.url
            self._note(step, first_given_up=step + is_own, is_chosen=True)

    def note_resume(self, step: int) -> None:
        """Training resumes after `step` steps: all that can be read is older. Called by all ranks."""
        self._note(step, first_given_up=step + 1, is_chosen=False)

    def _note(self, step: int, *, first_given_up: int, is_chosen: bool) -> None:
        self._loads += 1
        number = f"{self._worker.environment.generation}/{self._loads}"
        self._loaded = _LoadedState(number=number, step=step, first_given_up=first_given_up, is_chosen=is_chosen)
        self._is_mine = None

    def give_up(self, step: int) -> None:
        """Before a step is trained on the state after `step` steps: gives up what is later.

        Called by all ranks that took part in the newest load; the first of them does it for all. The step cannot be
        committed before. Raises CheckpointError when a checkpoint cannot be given up.
        """
        store, loaded = self._store, self._loaded
        if store is None or loaded is None:
            return
        if step != loaded.step:  # a step has been trained on it
            self._loaded = None
            return
        if self._is_mine is None:
            self._is_mine = self._is_first(f"{_KEY}/{loaded.number}")
        if not self._is_mine:
            return
        generation = self._worker.environment.generation
        find = partial(find_later_folders, store, loaded.first_given_up, generation=generation)
        if loaded.is_chosen:
            give_up_checkpoints(store, find(), generation=generation)
            return
        try:  # what is there is harmed: training needs neither it nor a store that is away
            give_up_checkpoints(store, ask_store(store.url, find, otherwise=[]), generation=generation)
        except CheckpointError as error:
            _log.warning("harmed checkpoints are not given up", reason=str(error))

    def _is_first(self, key: str) -> bool:
        """Whether no other process of the generation has asked for `key` before."""
        departure = self._worker.departure
        try:
            return self._worker.rendezvous.store.add(key, 1) == 1
        except torch.distributed.DistError as error:
            departure.leave_generation(PeerLost(f"before the first step: {first_line(error)}"))
            departure.raise_if_leaving()
            raise
