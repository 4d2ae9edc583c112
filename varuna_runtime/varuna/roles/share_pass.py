"""The pass of a step: a replica's share of the global batch, forward and backward.

What a share has may count when ranks are lost: it is kept, has marks, and may end early.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from varuna.copies.rank_shares import EarlierSums, RankShares
from varuna.distributed.topology import share_of_batch, spans_of_micro_batches
from varuna.partition.model_io.batch import batch_size_of
from varuna.pipeline.micro_batches import MicroBatch, cut_inputs, cut_spans, pin_inputs
from varuna.pipeline.pass_state import PassHooks, PassState
from varuna.roles.early_end import EarlyEnd
from varuna.roles.kept_shares import KeptShare
from varuna.roles.leaving import StateHolder
from varuna.roles.membership import GenerationMembership
from varuna.roles.progress import TrainingStep
from varuna.roles.training_parts import TrainingParts

__all__ = ["SharePass"]

_LEAST_PATIENCE_S = 5.0
"""How long a replica that finishes its share waits for one of its ranks at least, before it leaves the share undone."""


class SharePass:
    """Runs the shares of this rank's replica, one step after another."""

    def __init__(self, parts: TrainingParts, holder: StateHolder, membership: GenerationMembership) -> None:
        self._parts, self._worker = parts, parts.worker
        self._holder, self._membership = holder, membership
        self.example_s = 0.0
        """What each example of the newest pass took."""

    def run(self, step: TrainingStep, loss_scale: float) -> int:
        """Runs forward and backward of what this replica has to run; adds to what is kept of the step.

        Returns how many examples the global batch is expected to have.
        """
        parts, progress, plan = self._parts, self._parts.progress, self._worker.environment.plan
        kept, step.kept, rest, step.has_begun = step.kept, None, step.rest, True
        step.unbegun = None
        if rest is None or kept is None:
            kept = None
            for parameter in parts.assembly.stage.parameters.values():
                parameter.grad = None
        micro_batches = self._cut_share(step)
        global_batch = plan.global_batch or max(batch_size_of(step.inputs), 1)
        may_keep, began_s = self._may_keep(), time.monotonic()
        limit = self._limit_pass(micro_batches, may_keep=may_keep and (kept is None or kept.is_even))
        if may_keep and parts.can_copy_state and parts.ahead is not None:
            parts.ahead.begin_pass(progress.step, parts.checkpoints.training_state)
        with (
            self._finishing_share(limit) if may_keep else nullcontext(),
            self._marking_share(step, micro_batches, kept, may_mark=may_keep) as shares,
        ):
            passed = parts.assembly.engine.run_training_pass(
                micro_batches,
                expected_weight=partial(self.expect_weight, global_batch)
                if rest is None
                else lambda weight, examples: rest.expected_weight,
                seed=progress.seed,
                step=progress.step + 1,
                loss_scale=loss_scale,
                write_back_buffers=False,
                hooks=PassHooks(
                    before_backward=None if shares is None else shares.order_changes,
                    before_last_backward=self._mark_last_backward,
                    after_backward=partial(self._follow_backward, shares),
                    limit=limit,
                ),
            )
            ran = micro_batches[: limit.end]
            unit = self._find_micro_batch(step)
            share = KeptShare(tuple(micro_batch.index for micro_batch in ran), passed, unit)
            share = share if kept is None else kept.join(share)
            largest = max((micro_batch.examples for micro_batch in ran), default=unit)
            if largest != plan.micro_batch:  # the stage would look faster than it is
                share = replace(share, passed=share.passed.without_op_times())
            step.passed, step.kept = share.passed, share if may_keep else None
            if limit.agreed is not None:
                parts.leave_late_state(step)  # all ranks had what was late when they agreed
                step.unbegun = limit.agreed.unbegun
                limit.wait_for_others(self._holder.prepare_parting(share, limit.agreed, self._list_without_sums()))
        examples = sum(micro_batch.examples for micro_batch in ran)
        self.example_s = (time.monotonic() - began_s) / examples if examples else 0.0
        return global_batch

    def expect_weight(self, global_batch: int, weight: float, examples: int) -> float:
        """About what a global batch weighs; `weight` and `examples` are of this rank's first micro-batch."""
        if not self._parts.assembly.stage.weighted:
            return float(global_batch)
        return self._parts.expected_weight.estimate_sum(global_batch, weight, examples)

    def _mark_last_backward(self) -> None:
        """What is still late is added after it, so the gradients are not final then."""
        if self._parts.add_late_sums():
            self._parts.assembly.reducer.mark_last_backward()

    def _follow_backward(self, shares: RankShares | None, done: int, passed: PassState) -> None:
        self._parts.add_late_sums()  # before a mark, which has them
        if shares is not None:
            shares.follow_backward(done, passed)
        if self._parts.ahead is not None:
            self._parts.ahead.begin_round_if_asked()

    def _find_micro_batch(self, step: TrainingStep) -> int:
        """Examples in each micro-batch of the step that this replica has to run."""
        return self._worker.environment.plan.micro_batch if step.rest is None else step.rest.micro_batch

    def _cut_share(self, step: TrainingStep) -> list[MicroBatch]:
        """The micro-batches of the step that this replica has to run."""
        environment, stage = self._worker.environment, self._parts.assembly.stage
        if step.rest is None:
            if step.batch is not None:
                step.inputs = step.batch.renew()
            self._hold_inputs(step)
            sizes, first = share_of_batch(batch_size_of(step.inputs), environment, self._worker.topology.replica)
            inputs = pin_inputs(stage.empty_unread_inputs(step.inputs), self._parts.device)
            return cut_inputs(inputs, sizes, first, first * environment.plan.micro_batch)
        spans = spans_of_micro_batches(step.rest.numbers, step.rest.micro_batch, environment.plan.global_batch)
        examples: Mapping[str, Any] = {}
        if self._membership.is_last_step(step):
            examples = self._parts.inputs.join_inputs(step.rest.numbers, step.inputs)
        elif spans:
            self._membership.require_batch(step)
            assert step.batch is not None
            examples = step.batch.fetch_examples(spans.values())
        return cut_spans(pin_inputs(stage.empty_unread_inputs(examples), self._parts.device), spans)

    def _hold_inputs(self, step: TrainingStep) -> None:
        """Keeps the inputs of the step for others, where no process can make them again."""
        is_useful = not self._parts.assembly.stage.written.homes  # else nothing is kept of the step
        if is_useful and self._worker.departure.can_stay and self._holder.find_script_obstacle():
            micro_batch_s = self._predict_micro_batch_s(step)
            self._parts.inputs.hold_share(self._worker, self._parts.progress.step + 1, step.inputs, micro_batch_s)

    def _predict_micro_batch_s(self, step: TrainingStep) -> float:
        """About what each micro-batch of the step takes, the same on all ranks; 0: it is not known."""
        totals = self._parts.progress.committed_totals
        return 0.0 if totals is None else totals.example_s * self._find_micro_batch(step)

    def _may_keep(self) -> bool:
        """Whether what this rank runs of the step may stay valid when other ranks are lost."""
        return (
            self._worker.departure.can_stay
            and not self._parts.assembly.stage.written.homes
            and not self._holder.find_obstacle_in_step()
        )

    def _limit_pass(self, micro_batches: Sequence[MicroBatch], *, may_keep: bool) -> EarlyEnd:

        def may_end() -> bool:
            return (
                self._parts.has_late_state and may_keep and self._is_weight_known() and not self._holder.find_obstacle()
            )

        sizes = [micro_batch.examples for micro_batch in micro_batches]
        return EarlyEnd(self._worker, self._parts.progress.step + 1, sizes, may_end=may_end)

    def _is_weight_known(self) -> bool:
        """Whether this rank can pass alone: if not, the replicas exchange what their first micro-batches weigh."""
        return not self._parts.assembly.stage.weighted or self._parts.expected_weight.is_known

    def _finishing_share(self, limit: EarlyEnd) -> AbstractContextManager[None]:
        """Around a pass that is finished when another replica has lost a rank, or as far as all have agreed on."""
        if not self._is_weight_known():
            return nullcontext()
        shares, has_others = self._parts.shares, self._worker.topology.d > 1

        def is_worth_it() -> bool:
            return limit.end is not None or (has_others and (shares is None or shares.is_worth_finishing()))

        patience_s = _LEAST_PATIENCE_S + 3 * self._parts.assembly.engine.longest_bubble_s
        return self._worker.departure.finish_first(self._worker.topology.mates, patience_s, is_worth_it)

    @contextmanager
    def _marking_share(
        self, step: TrainingStep, micro_batches: Sequence[MicroBatch], kept: KeptShare | None, *, may_mark: bool
    ) -> Iterator[RankShares | None]:
        """Around a pass: yields what copies its sums at marks, and follows each backward; None: there are no marks."""
        shares, late = self._parts.shares, self._parts.late
        stage, progress = self._parts.assembly.stage, self._parts.progress
        is_whole = kept is None or kept.is_even
        if shares is None or not (may_mark and self._is_weight_known() and is_whole):
            yield None
            return
        try:
            shares.begin_pass(
                progress.step + 1,
                [micro_batch.index for micro_batch in micro_batches],
                stage.parameters,
                sections=stage.sections,
                kept=None
                if kept is None
                else EarlierSums(kept.numbers, kept.passed, have_all=None if late is None else late.have_all),
                micro_batch=self._find_micro_batch(step),
                micro_batch_s=self._predict_micro_batch_s(step),
                without_sums=self._list_without_sums(),
            )
            yield shares
        finally:
            shares.end_pass()

    def _list_without_sums(self) -> list[range]:
        """The sections of each of the first stages that get no gradients, and so train nothing."""
        stages, model_map = self._parts.stages, self._parts.model_map
        return list(takewhile(lambda stage: stage != stages[-1] and not model_map.has_gradients(stage.stop), stages))
