"""Where a resumed training is in the stream of samples: `resume` leaves it here, and `Batches` goes on from it.

A script hands neither to the other: it says `Batches(..., first_step=model.resume() + 1)`, and no more. So this is one
value of the process, as the environment is.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from varuna.checkpoint import Cursor, Loaded
from varuna_proto.environment import WorkerEnvironment

__all__ = ["ResumedAt", "SampleCount", "note_resumed", "samples_before"]

_log = structlog.get_logger("varuna")


class ResumedAt(NamedTuple):
    """What a checkpoint says of the samples that its training has used."""

    step: int
    samples: int


_resumed_at: ResumedAt | None = None


def note_resumed(resumed_at: ResumedAt | None) -> None:
    """Sets where the training of this process goes on; None: at its beginning, or nobody has counted."""
    global _resumed_at
    _resumed_at = resumed_at


def samples_before(first_step: int) -> int | None:
    """The samples used before `first_step`; None unless a training that was resumed goes on with exactly this step."""
    if _resumed_at is None or _resumed_at.step + 1 != first_step:
        return None
    return _resumed_at.samples


class SampleCount:
    """Counts the samples that training uses, for its checkpoints."""

    def __init__(self) -> None:
        self._samples: int | None = 0
        self._global_batch: int | None = None

    @property
    def cursor(self) -> Cursor | None:
        """For a checkpoint; None while it is not known, or before the first step."""
        if self._samples is None or self._global_batch is None:
            return None
        return Cursor(samples=self._samples, global_batch=self._global_batch)

    def add_step(self, global_batch: int) -> None:
        self._global_batch = global_batch
        if self._samples is not None:
            self._samples += global_batch

    def load(self, loaded: Loaded, environment: WorkerEnvironment) -> None:
        """Goes on from a checkpoint, for `Batches` too. Says so when the global batch is another one."""
        cursor = loaded.cursor
        if cursor is None:  # an earlier version wrote it, under which steps only ever had one size
            note_resumed(None)
            now = environment.global_batch
            self._samples, self._global_batch = (loaded.step * now, now) if now else (None, None)
            return
        self._samples, self._global_batch = cursor.samples, cursor.global_batch
        note_resumed(ResumedAt(loaded.step, cursor.samples))
        if environment.rank == 0 and environment.global_batch not in (0, cursor.global_batch):
            _log.warning(
                "the global batch has changed; Batches(first_step=resume() + 1) goes on with the next unseen sample",
                step=loaded.step,
                samples=cursor.samples,
                was=cursor.global_batch,
                now=environment.global_batch,
            )
