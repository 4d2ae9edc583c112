"""The position of a resumed training in the stream of samples: `resume` sets it, and `Batches` continues from it.

A script passes only the step from one to the other: `Batches(..., first_step=model.resume() + 1)`. So the position is
one value of the process, like the environment.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from varuna.checkpoint import LoadedCheckpoint, SampleCursor
from varuna_proto.environment import WorkerEnvironment

__all__ = ["ResumePoint", "SampleCount", "count_samples_before", "set_resume_point"]

_log = structlog.get_logger("varuna")


class ResumePoint(NamedTuple):
    """The step of a checkpoint, and the samples that its training has used."""

    step: int
    samples: int


_resumed_at: ResumePoint | None = None


def set_resume_point(resumed_at: ResumePoint | None) -> None:
    """Sets where the training of this process continues; None: from its beginning, or the samples are not known."""
    global _resumed_at
    _resumed_at = resumed_at


def count_samples_before(first_step: int) -> int | None:
    """The samples used before `first_step`; None unless a resumed training continues with this step."""
    if _resumed_at is None or _resumed_at.step + 1 != first_step:
        return None
    return _resumed_at.samples


class SampleCount:
    """Counts the samples that training uses, for its checkpoints."""

    def __init__(self) -> None:
        self._samples: int | None = 0
        self._global_batch: int | None = None

    @property
    def cursor(self) -> SampleCursor | None:
        """For a checkpoint; None if it is not known, and before the first step."""
        if self._samples is None or self._global_batch is None:
            return None
        return SampleCursor(samples=self._samples, global_batch=self._global_batch)

    def add_step(self, global_batch: int) -> None:
        self._global_batch = global_batch
        if self._samples is not None:
            self._samples += global_batch

    def load_cursor(self, loaded: LoadedCheckpoint, environment: WorkerEnvironment) -> None:
        """Continues from a checkpoint, also in `Batches`. Logs a change of the global batch."""
        cursor = loaded.cursor
        if cursor is None:  # an earlier version wrote it, in which all steps had one size
            set_resume_point(None)
            now = environment.plan.global_batch
            self._samples, self._global_batch = (loaded.step * now, now) if now else (None, None)
            return
        self._samples, self._global_batch = cursor.samples, cursor.global_batch
        set_resume_point(ResumePoint(loaded.step, cursor.samples))
        if environment.rank == 0 and environment.plan.global_batch not in (0, cursor.global_batch):
            _log.warning(
                "the global batch has changed; Batches(first_step=resume() + 1) continues with the next unseen sample",
                step=loaded.step,
                samples=cursor.samples,
                was=cursor.global_batch,
                now=environment.plan.global_batch,
            )
