"""Checkpoints that a script asked for and that failed: all ranks raise, or the script ends with code 1."""

from __future__ import annotations

import json
import sys

import torch

from varuna.agreement import Totals, agree
from varuna.checkpoint import Checkpointer, CheckpointError, SaveOutcome
from varuna.departure import PeerLost
from varuna.error_text import first_line
from varuna.launch import Group
from varuna.saves import wait_for_save
from varuna.worker import Worker

__all__ = ["FailedSaves"]

_KEY = "varuna.failed-save"


class FailedSaves:
    """What became of the saves that the script asked for, on one rank and together with the others."""

    def __init__(self, worker: Worker, everyone: Group) -> None:
        self._worker = worker
        self._everyone = everyone
        self._background: Checkpointer | None = None
        self._failures = 0

    def expect(self, checkpointer: Checkpointer) -> None:
        """Notes that a save goes on in the background."""
        self._background = checkpointer

    def check_background(self) -> None:
        """Waits for that save. Called by all ranks; raises CheckpointError on all when any has failed."""
        checkpointer, self._background = self._background, None
        if checkpointer is not None:
            self.check(checkpointer)

    def check(self, checkpointer: Checkpointer) -> None:
        """Waits for its save. Called by all ranks; raises CheckpointError on all when any has failed."""
        wait_for_save(checkpointer, self._worker.departure)
        failure = checkpointer.take_failure()
        if agree(self._everyone, Totals(loss_sum=float(failure is not None), examples=0)).loss_sum:
            raise CheckpointError(self._shared_text(failure))

    def _shared_text(self, failure: SaveOutcome | None) -> str:
        """What rank 0 knows, which the receipts of the others have told; where this rank has failed too, that."""
        own = "" if failure is None else _text(failure)
        self._failures += 1
        environment, store = self._worker.environment, self._worker.rendezvous.store
        if environment.world_size == 1:
            return own
        key = f"{_KEY}/{self._failures}"
        try:
            if environment.rank == 0:
                store.set(key, json.dumps(own))
            text: str = own or json.loads(store.get(key))
        except torch.distributed.DistError as error:
            self._worker.departure.leave(PeerLost(f"after a failed checkpoint: {first_line(error)}"))
            self._worker.departure.check()
            raise
        return text or "the checkpoint was not saved: another rank could not write its part, and its log says why"

    def end_script(self) -> None:
        """At the script's end: makes it end with code 1 when a save in the background has failed."""
        failure = None if self._background is None else self._background.take_failure()
        if failure is None:
            return
        text = f"varuna.checkpoint.CheckpointError: {_text(failure)}"
        sys.stderr.write(f"{text}\n")
        self._worker.link.failure(text)
        self._worker.departure.end_with(1)


def _text(failure: SaveOutcome) -> str:
    return f"the checkpoint of step {failure.step} was not saved in {failure.url}: {failure.error}"
