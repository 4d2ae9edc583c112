"""Requested checkpoints that failed: all ranks raise, or the script ends with code 1."""

from __future__ import annotations

import json
import sys

import torch

from varuna.checkpoint import CheckpointError, CheckpointWriter, SaveOutcome
from varuna.checkpoint.saving.automatic import wait_for_save
from varuna.diagnostics.error_text import first_line
from varuna.distributed.agreement import StepTotals, agree_on_totals
from varuna.distributed.departure import PeerLost
from varuna.distributed.groups import RankGroup
from varuna.worker.worker import WorkerProcess

__all__ = ["SaveFailures"]

_KEY = "varuna.failed-save"


class SaveFailures:
    """Finds failed saves among those that the script requested, together with the other ranks."""

    def __init__(self, worker: WorkerProcess, everyone: RankGroup) -> None:
        self._worker = worker
        self._everyone = everyone
        self._background: CheckpointWriter | None = None
        self._failures = 0

    def watch_save(self, writer: CheckpointWriter) -> None:
        """Remembers the writer of a save in the background."""
        self._background = writer

    def check_background(self) -> None:
        """Waits for the background save. Called by all ranks; raises CheckpointError on all when any has failed."""
        writer, self._background = self._background, None
        if writer is not None:
            self.check_save(writer)

    def check_save(self, writer: CheckpointWriter) -> None:
        """Waits for the writer's save. Called by all ranks; raises CheckpointError on all when any has failed."""
        wait_for_save(writer, self._worker.departure)
        failure = writer.pop_failure()
        if agree_on_totals(self._everyone, StepTotals(loss_sum=float(failure is not None), examples=0)).loss_sum:
            raise CheckpointError(self._share_message(failure))

    def _share_message(self, failure: SaveOutcome | None) -> str:
        """This rank's failure if it has one, else that of rank 0, which includes the receipts' errors of the others."""
        own = "" if failure is None else _render_failure(failure)
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
            self._worker.departure.leave_generation(PeerLost(f"after a failed checkpoint: {first_line(error)}"))
            self._worker.departure.raise_if_leaving()
            raise
        return text or "the checkpoint was not saved: another rank could not write its part, and its log says why"

    def end_script(self) -> None:
        """At the script's end: makes it end with code 1 when a save in the background has failed."""
        failure = None if self._background is None else self._background.pop_failure()
        if failure is None:
            return
        text = f"varuna.checkpoint.CheckpointError: {_render_failure(failure)}"
        sys.stderr.write(f"{text}\n")
        self._worker.link.report_failure(text)
        self._worker.departure.set_end_code(1)


def _render_failure(failure: SaveOutcome) -> str:
    return f"the checkpoint of step {failure.step} was not saved in {failure.url}: {failure.error}"
