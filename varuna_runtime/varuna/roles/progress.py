"""Where a rank's training is: the steps that are done, and the call of the script that is under way."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from varuna.data.batches import RecentBatch
from varuna.data.sample_cursor import SampleCount
from varuna.distributed.agreement import StepTotals
from varuna.distributed.calls import CallKind
from varuna.pipeline.pass_state import PassResult
from varuna.roles.kept_shares import KeptShare, StepRest

__all__ = ["TrainingProgress", "TrainingStep"]


@dataclass(kw_only=True)
class TrainingStep:
    """One call of `Varuna.step`, and how far it has come. It may go on in another generation."""

    inputs: Mapping[str, Any]
    batch: RecentBatch | None
    """What the inputs are, if a `Batches` made them last when the call began; None: they are the script's own, or the
    script has changed them."""
    clip_grad_max_norm: float | None
    has_begun: bool = False
    """Whether a pass has."""
    passed: PassResult | None = None
    kept: KeptShare | None = None
    """What `.grad` has of the step, while no sum over other ranks has replaced it."""
    unbegun: int | None = None
    """If the newest pass of all ranks has ended early, in order: the examples that none of them has begun. All that it
    had begun is in `kept`."""
    rest: StepRest | None = None
    """What this rank's replica has to run in the present generation; None: its share of the global batch."""
    redone: int = 0
    """The micro-batches that all replicas of the present generation run again."""
    is_reduced: bool = False
    """Whether `.grad` holds the sums over all ranks, so that only the totals are missing."""
    totals: StepTotals | None = None
    """What all ranks have agreed on: the step is committed."""
    overflow: bool = False
    is_updated: bool = False
    """Whether the update has been made."""
    was_interrupted: bool = False
    """Whether this process left a generation after the totals had been agreed on."""

    def drop_share(self) -> None:
        """Forgets what is kept, because `.grad` no longer has it."""
        self.kept = None


class TrainingProgress:
    """Where the training is.

    Attributes:
        seed: of all random draws.
        step: the last step that is done.
        is_ready: the script has prepared everything.
        is_broken: a step is half-way, or has failed there.
        newest_step: the newest call of `step`; None before the first one.
        committed_totals: of the newest committed step.
        other_call: the call under way, unless it is a step.
        has_call_failed: another call than a step is under way, or has raised an exception and no call has followed.
        is_half_loaded: a load has begun to change the state, and has not ended. It may have failed there.
        can_reevaluate: an evaluation is under way that can begin again in another generation.
        evaluations: how many are done.
        evaluated_since_step: how many of them are done since the newest step, or since a load.
        evaluated_loss: of the newest of them.
        missed_loss: of the one under way, if the other ranks have agreed on it without this one; None: they have not.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.samples = SampleCount()
        self.is_ready = False
        self.is_broken = False
        self.newest_step: TrainingStep | None = None
        self.committed_totals: StepTotals | None = None
        self.other_call: CallKind | None = None
        self.has_call_failed = False
        self.is_half_loaded = False
        self.can_reevaluate = False
        self.evaluations = 0
        self.evaluated_since_step = 0
        self.evaluated_loss = 0.0
        self.missed_loss: float | None = None
        self._counting = threading.Lock()

    def begin_load(self) -> None:
        """A load begins to change the state."""
        self.is_half_loaded = True
        self.evaluated_since_step = 0

    def check_state(self) -> None:
        """Raises RuntimeError where the state is of no step."""
        if self.is_half_loaded:
            raise RuntimeError(
                "load_checkpoint() or resume() has failed half-way, so the state may be of two steps: load a "
                "checkpoint again, or end the script"
            )

    def count_step(self, step: TrainingStep, examples: int) -> None:
        """Counts the step, whose update has been made, with so many examples in its global batch."""
        with self._counting:
            self.step += 1
            self.evaluated_since_step = 0
            self.samples.add_step(examples)
            step.is_updated = True

    def count_evaluation(self, loss: float) -> None:
        """Counts an evaluation, whose loss this rank has."""
        self.evaluations, self.evaluated_loss, self.missed_loss = self.evaluations + 1, loss, None
        self.evaluated_since_step += 1
        self.has_call_failed = False

    def find_committed(self, step: TrainingStep | None) -> int:
        """The newest step that this rank knows as committed. `step`: the call under way. From any thread."""
        with self._counting:
            is_agreed = step is not None and step.totals is not None and not step.is_updated
            return self.step + is_agreed
