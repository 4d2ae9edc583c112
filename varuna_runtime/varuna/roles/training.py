"""Training: this process trains one stage of one replica, together with all other ranks.

This is what the script calls: steps, evaluation, checkpoints. `GenerationMembership` does what comes between two
generations of the job.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from torch.optim import Optimizer

from varuna.assembly.assembly import Assembly
from varuna.checkpoint import CheckpointRequest, StateScope
from varuna.checkpoint.script_states import Stateful
from varuna.copies.ahead_taker import AheadTaker
from varuna.copies.rank_ahead import RankAhead
from varuna.copies.rank_copies import RankCopies
from varuna.copies.rank_shares import RankShares, has_keepers
from varuna.data.batches import RecentBatch, find_recent_batch
from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.step_clock import STEP_CLOCK, Activity
from varuna.diagnostics.tensorboard import TensorBoardWriter
from varuna.distributed.agreement import StepTotals, agree_on_totals
from varuna.distributed.calls import CallKind
from varuna.distributed.departure import GenerationEnded, PeerLost
from varuna.distributed.topology import place_in_batch, share_of_batch
from varuna.model.fixed_module import ModelSurface
from varuna.optim.optimizers import check_parameters, find_learning_rate, log_left_out
from varuna.optim.parameter_updater import StepGradient
from varuna.optim.precision import LossScaler
from varuna.optim.reduction import clip_factor
from varuna.optim.split_check import check_splittable
from varuna.optim.weight_average import WeightAverage
from varuna.partition.model_io.batch import batch_size_of
from varuna.pipeline.micro_batches import cut_inputs, pin_inputs
from varuna.pipeline.pass_state import PassResult
from varuna.pipeline.random_streams import evaluation_seed
from varuna.roles.failing import explaining_memory
from varuna.roles.leaving import StateHolder
from varuna.roles.membership import GenerationMembership
from varuna.roles.progress import TrainingStep
from varuna.roles.reshaping import can_hold_state
from varuna.roles.role import missing_optimizer
from varuna.roles.share_pass import SharePass
from varuna.roles.training_parts import TrainingOptions, TrainingParts
from varuna.roles.wrapped_model import WrappedModel
from varuna.worker.worker import UpdateFigures

__all__ = ["TrainingRole"]

T = TypeVar("T")

_ACTIVITIES = {
    CallKind.EVALUATE: Activity.EVALUATION,
    CallKind.CHECKPOINT: Activity.CHECKPOINT,
    CallKind.FULL_STATE_DICT: Activity.CHECKPOINT,
}


class TrainingRole:
    """Trains this rank's stage. All ranks call the same methods in the same order."""

    def __init__(
        self,
        wrapped: WrappedModel,
        seed: int,
        options: TrainingOptions,
        *,
        scalars: TensorBoardWriter,
        follow_surface: Callable[[ModelSurface], None],
        taken_ahead: AheadTaker,
    ) -> None:
        """`seed`: the job's, if this is rank 0. `scalars`: where each step's figures go for TensorBoard.

        `follow_surface` is called with what the script sees of the model when that is another stage. `taken_ahead`:
        sections of the state that came before this process had its rank.
        """
        self._parts = parts = TrainingParts(
            wrapped, seed, options, scalars=scalars, follow_surface=follow_surface, taken_ahead=taken_ahead
        )
        self._worker, self._device, self._precision = parts.worker, parts.device, parts.precision
        self._progress, self._expected_weight = parts.progress, parts.expected_weight
        self._updater, self._swap, self._changes = parts.updater, parts.swap, parts.changes
        self.checkpoints = parts.checkpoints
        STEP_CLOCK.restart()
        self._holder = StateHolder(parts)
        self._membership = GenerationMembership(parts, self._holder)
        self._share = SharePass(parts, self._holder, self._membership)
        if not self._worker.environment.joins_survivors:
            self._worker.phases.end_phase("connect")

    @property
    def surface(self) -> ModelSurface:
        return self._parts.surface

    @property
    def assembly(self) -> Assembly:
        return self._parts.assembly

    @property
    def average(self) -> WeightAverage | None:
        return self._updater.average

    @property
    def loss_scale(self) -> float:
        return self._updater.loss_scale

    def set_mode(self, training: bool) -> None:
        self._changes.pull_modes()
        self.assembly.stage.module.train(training)
        self._changes.push_modes()

    def set_optimizers(self, optimizers: Sequence[Optimizer], scaler: LossScaler | None) -> None:
        before = self._updater.optimizers
        if before and set(map(id, before)) != set(map(id, optimizers)):
            raise ValueError(
                "set_optimizer was called before, with other optimizers: give it all of them at once, in a list: "
                "set_optimizer([first, second])"
            )
        check_parameters(optimizers, self._parts.parameters)
        for optimizer in optimizers:
            check_splittable(optimizer, self._worker.environment, self._parts.section_count)
        if self._worker.topology.replica == 0:
            log_left_out(optimizers, self._changes.select_trained(self._parts.parameters))
        self._updater.set_optimizers(optimizers)
        if scaler is not None:
            self._updater.scaler = scaler
            self.checkpoints.hold_scaler(scaler)

    # Steps

    def train_step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None) -> tuple[float, bool, float]:
        batch = find_recent_batch(inputs)
        step = TrainingStep(inputs=inputs, batch=batch, clip_grad_max_norm=clip_grad_max_norm)
        self._membership.begin_first_step(step)

        def run() -> tuple[float, bool, float]:
            with explaining_memory(self._device, self._worker.topology, self._worker.environment.plan):
                return self._run_step(step)

        return self._go_on_in_place(step, run)

    def _go_on_in_place(self, step: TrainingStep | None, run: Callable[[], T]) -> T:
        """What `run` returns, which begins again in the next generation when this process has left the present one, and
        stays. `step`: the call under way; None: it is another call."""
        while True:
            try:
                return run()
            except (GenerationEnded, PeerLost):
                if not self._worker.departure.stays:
                    raise
            self._membership.join_next(step)  # when the exception is gone, whose frames hold parts of the stage

    def _run_step(self, step: TrainingStep) -> tuple[float, bool, float]:
        """Runs what is left of the step.

        On an accelerator the host waits for the device to read the losses and the gradient's norm, and else for events
        only: so that at most one op is left to finish when the engine chooses the next, and for what is sent.
        """
        if step.totals is None:
            self._begin_step(step)
            totals = self._pass_and_agree(step)
            if totals.changed:
                self._membership.leave_changed_step(step)
                if self._parts.shares is not None:
                    self._parts.shares.forget_sums()
                self._changes.exchange_changes()
                self._follow_changes()
                totals = self._pass_and_agree(step)
            step.totals = self._progress.committed_totals = totals
        gradient = self._step_gradient(step.totals)
        if not step.is_updated:
            self._update(step, step.totals, gradient)
            if not step.was_interrupted:  # else they have been equal since the ranks connected
                self.assembly.equalize_buffers()
        self._updater.watch_gradients()
        self._progress.is_broken = False
        self.checkpoints.set_boundary_requests(step.totals.requests)
        if self._parts.copies is not None:
            self._parts.copies.record_agreement(is_any_busy=step.totals.requests.copying)
            self.checkpoints.record_copies(are_whole=self._parts.copies.whole_step > 0)
        self._report_step(step, step.totals, gradient.norm)
        self._parts.habits.end_step(self._updater.optimizers, self.checkpoints.registered)
        return step.totals.loss, step.overflow, gradient.norm

    def _begin_step(self, step: TrainingStep) -> None:
        """All that comes before the passes of a step."""
        self._check_optimizers("step")
        if self._progress.is_broken:
            raise RuntimeError("an earlier step failed half-way, so the ranks may disagree: end the script")
        self._progress.check_state()
        self._updater.check_gradients()
        clip_factor(0.0, step.clip_grad_max_norm)  # refuses a bad bound before any work is done
        self._progress.newest_step, self._progress.has_call_failed = step, False
        self._parts.habits.begin_step(self._updater.optimizers, self.checkpoints.registered)
        self._worker.departure.raise_if_leaving()
        self._membership.check_call(CallKind.STEP)
        if lost := self.checkpoints.explain_lost_groups():
            raise RuntimeError(lost)
        self._worker.calls.enter_call(CallKind.STEP, self._progress.step)
        self._membership.compare_replicas()
        self._updater.accumulation.inspect_script(self._updater.optimizers)
        self.checkpoints.checkpointing.later.give_up(self._progress.step)
        if not self._parts.lacks_state:
            with STEP_CLOCK.measure(Activity.CHECKPOINT):
                self.checkpoints.save_automatic_checkpoint()
        self._membership.leave_after_last_step(step)
        self._worker.departure.raise_if_leaving()
        STEP_CLOCK.begin_step()
        self._membership.report_ready()
        self._progress.is_broken = True
        self._changes.begin_step(is_rest=step.rest is not None)
        self._follow_changes()
        self._begin_copies()

    def _begin_copies(self) -> None:
        """Begins to copy the state to its keeper, if it is time for that. The step's passes do not change it."""
        worker = self._worker
        if self._parts.shares is None and has_keepers(worker.environment):
            self._parts.shares = RankShares(worker, is_pipeline_sending=lambda: self.assembly.links.are_sending)
        if self._parts.copies is None and worker.environment.keepers and can_hold_state(worker.environment):
            self._parts.copies = RankCopies(
                worker,
                self._device,
                count_state_bytes=lambda: self.checkpoints.state_bytes,
                is_pipeline_sending=lambda: self.assembly.links.are_sending,
            )
        if self._parts.ahead is None and can_hold_state(worker.environment):
            self._parts.ahead = RankAhead(
                worker,
                self._device,
                section_count=self._parts.section_count,
                shared=self._parts.model_map.shared,
                is_pipeline_sending=lambda: self.assembly.links.are_sending,
            )
        # Before the first step, the state is that of a start.
        if self._parts.copies is not None and self._parts.can_copy_state:
            self._parts.copies.begin_round(self._progress.step, self.checkpoints.training_state)

    def _update(self, step: TrainingStep, totals: StepTotals, gradient: StepGradient) -> None:
        """Makes the update of an agreed step: from here on the state is that after the step."""
        self._holder.drop_state_before()
        # The norm covers every gradient of the model and is the same on all ranks, so all ranks decide alike.
        step.overflow = self._parts.non_finite.decide_skip(
            self._progress.step + 1, totals.loss, gradient.norm, self._updater.scaler
        )
        self._expected_weight.learn_from_batch(totals.weight, totals.examples)
        self._updater.finish_step(gradient, step.clip_grad_max_norm, skip=step.overflow)
        self._progress.count_step(step, self._worker.environment.plan.global_batch or totals.examples)

    def _step_gradient(self, totals: StepTotals) -> StepGradient:
        """Backwards were divided by the expected weight of the batch; its true weight may be another."""
        weight = self._updater.accumulation.total_weight(totals.weight)
        correction = totals.expected_weight / weight / self.loss_scale if totals.weight else math.nan
        return StepGradient(
            weight=totals.weight,
            correction=correction,
            norm=math.sqrt(totals.squared_norm) * correction,
            overflow=not math.isfinite(totals.squared_norm),
        )

    def _report_step(self, step: TrainingStep, totals: StepTotals, gradient_norm: float) -> None:
        assert step.passed is not None
        if not step.overflow:
            self.checkpoints.count_updated_state()
        number, skipped = self._progress.step, step.overflow and self._parts.non_finite.in_a_row > 0
        times = STEP_CLOCK.end_step()
        self._worker.report_step(
            number,
            totals.loss,
            examples=totals.examples,
            passed=step.passed,
            times=times,
            device=self._device,
            update=UpdateFigures(skipped, gradient_norm, find_learning_rate(self._updater.optimizers)),
            copies=self._parts.find_copies_figures(),
        )
        self._parts.scalars.write_step(
            number, totals.loss, times.whole_ns / 1e9, examples=totals.examples, optimizers=self._updater.optimizers
        )

    def _pass_and_agree(self, step: TrainingStep) -> StepTotals:
        """Runs forward and backward and agrees with the other ranks; `.grad` then holds what was accumulated, too.

        If a rank has seen a change by the script (`StepTotals.changed`), everything is as it was before.
        """
        accumulation, stage = self._updater.accumulation, self.assembly.stage
        with self._passing(in_order=True):
            accumulation.hold_gradients(stage.parameters.values())
            scale = self.loss_scale
            try:
                global_batch = self._share.run(step, scale)
                assert step.passed is not None
                self._parts.add_late_sums(waits=True)
                self.assembly.reducer.reduce_gradients(step.drop_share)
                self.assembly.timeline.end_step()
                if accumulation.is_pending:
                    accumulation.add_held_gradients(scale / self._share.expect_weight(global_batch, 0.0, 0))
                # What the passes have written counts only once all ranks agree; without such buffers nothing is open.
                step.is_reduced = not stage.written.homes
                self._parts.finish_captures()
                self._parts.fill_late_state()
                totals = self._agree_on(step.passed)
            except (GenerationEnded, PeerLost):
                stage.written.discard_writes()
                raise
            if totals.changed:
                step.is_reduced, step.rest = False, None
                accumulation.restore_gradients(stage.parameters.values())
            if totals.changed or self._parts.non_finite.leaves_no_trace(totals.loss, self._step_gradient(totals).norm):
                stage.written.discard_writes()
            else:
                stage.written.write_back()
        return totals

    def _agree_on(self, passed: PassResult) -> StepTotals:
        is_first_replica = self._worker.topology.replica == 0
        return agree_on_totals(
            self.assembly.everyone,
            StepTotals(
                loss_sum=passed.loss_sum,
                examples=passed.examples,
                weight=passed.weight,
                expected_weight=passed.expected_weight if is_first_replica else 0.0,
                squared_norm=self.assembly.reducer.squared_norm(),
                example_s=self._share.example_s / self._worker.environment.world_size,
                requests=replace(
                    self.checkpoints.boundary_requests(),
                    copying=self._parts.copies is not None and self._parts.copies.is_busy,
                ),
                changed=self._changes.are_pending,
            ),
        )

    def _follow_changes(self) -> None:
        """Makes the stage run as the script has changed the model, once all ranks know of the change."""
        if not self._changes.needs_trace:
            return
        self.checkpoints.finish_copy()
        with keep_global_generators(self._device), self._precision.dry_run_context():
            model_map = self._changes.trace_model(self._parts.retracer, self._parts.wrapped_map)
            self._parts.model_map = model_map
        self._precision.check_parameters(self.assembly.stage.parameters.items())
        with self._swap.change_pass_tensors():
            self.assembly.apply_map(model_map, self._updater.host)
        self.checkpoints.hold_stage(model_map)
        for optimizer in self._updater.optimizers:
            self._changes.refuse_foreign_parameters(optimizer)

    @contextmanager
    def _passing(self, *, in_order: bool = False) -> Iterator[None]:
        """Around a pass: the stage computes with what the script has left in the model.

        `in_order`: its sections use the parameters as in the dry run.
        """
        with self._taking_parameters(in_order), self._swap.use_pass_tensors(), self._precision.pass_context():
            yield

    @contextmanager
    def _taking_parameters(self, in_order: bool) -> Iterator[None]:
        """Where the optimizer is on the host: the parameters come from there.

        `in_order`: the first forward computes with those of a section while those of the next ones come.
        """
        host, stage = self._updater.host, self.assembly.stage
        if host is None or not in_order:
            if host is not None:
                host.copy_to_device()
            yield
            return
        arriving = host.start_copying_to_device(stage.first_sections)
        stage.before_section = arriving.wait_for_section
        try:
            yield
        finally:
            stage.before_section = None
            arriving.end()

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None, *, ema: bool) -> float:
        if ema and self.average is None:
            raise ValueError("evaluate(ema=True), but no average is kept: keep one with Varuna(..., ema=0.999)")
        batch = find_recent_batch(inputs)
        self._progress.can_reevaluate = batch is not None
        try:
            loss = self._go_on_in_place(None, lambda: self._find_loss(inputs, batch, batch_size, ema=ema))
        finally:
            self._progress.can_reevaluate = False
        self._progress.count_evaluation(loss)
        return loss

    def _find_loss(
        self, inputs: Mapping[str, Any], batch: RecentBatch | None, batch_size: int | None, *, ema: bool
    ) -> float:
        """Evaluates, unless the other ranks have done that without this one, which left before it knew: they know the
        loss."""
        if self._progress.missed_loss is not None:
            return self._progress.missed_loss
        with self._calling(CallKind.EVALUATE):
            return self._evaluate_together(inputs if batch is None else batch.renew(), batch_size, ema=ema)

    def _evaluate_together(self, inputs: Mapping[str, Any], batch_size: int | None, *, ema: bool) -> float:
        inputs = pin_inputs(inputs, self._device)
        share = batch_size_of(inputs), self._worker.environment, self._worker.topology.replica
        sizes, first = share_of_batch(*share)
        progress = self._progress
        parameters = self.assembly.stage.parameters
        averaged = self.average.exchange_values(parameters) if ema and self.average is not None else nullcontext()
        with self.assembly.evaluation_mode(), self._passing(), averaged:
            passed = self.assembly.engine.run_evaluation_pass(
                cut_inputs(inputs, sizes, first, place_in_batch(*share)),
                self._worker.link.report_progress,
                seed=evaluation_seed(progress.seed, progress.evaluated_since_step),
                step=progress.step,
            )
        totals = agree_on_totals(
            self.assembly.everyone,
            StepTotals(loss_sum=passed.loss_sum, examples=passed.examples, weight=passed.weight),
        )
        if batch_size is not None and totals.examples != batch_size:
            raise ValueError(
                f"batch_size={batch_size}, but the inputs of all replicas hold {totals.examples} examples: "
                "give each replica its share"
            )
        self._parts.non_finite.explain_evaluation(totals.loss)
        return totals.loss

    def gather_state(self) -> dict[str, Any]:
        with self._calling(CallKind.FULL_STATE_DICT):
            return self._parts.gather_state()

    # Checkpoints

    def register_state(self, name: str, state: Stateful, per: StateScope) -> None:
        self.checkpoints.registered.register_state(name, state, per=per)

    def save_checkpoint(
        self, url: str, step: int | None, *, request: CheckpointRequest, tmpdir: str | None, in_background: bool
    ) -> None:
        with self._calling(CallKind.CHECKPOINT):
            self.checkpoints.save_checkpoint(url, step, request=request, tmpdir=tmpdir, in_background=in_background)

    def load_checkpoint(self, url: str, step: int) -> None:
        self._check_optimizers("load_checkpoint")
        with self._calling(CallKind.LOAD):
            self.checkpoints.checkpointing.finish_own_save()  # before any rank loads: it may be given up afterwards
            self.checkpoints.load_checkpoint(url, step)
            self._forget_kept()

    def resume(self, *, allow_fresh_start: bool) -> int:
        self._check_optimizers("resume")
        if self._membership.is_awaited_in_resume:
            self._membership.join_survivors()
            return self._progress.step
        with self._calling(CallKind.RESUME):
            self.checkpoints.resume_training(allow_fresh_start=allow_fresh_start)
            self._forget_kept()
        self._membership.report_ready()
        return self._progress.step

    def _forget_kept(self) -> None:
        """All ranks have another state now, perhaps of an older step, which is trained again with other samples."""
        if self._parts.copies is not None:
            self._parts.copies.forget_copies()
        if self._parts.ahead is not None:
            self._parts.ahead.forget_states()
        if self._parts.shares is not None:
            self._parts.shares.forget_sums()
        self._parts.parting = None
        self._parts.inputs.forget_inputs()

    @contextmanager
    def _calling(self, kind: CallKind) -> Iterator[None]:
        """Around a call that all ranks make together and that is no step. A process that has to leave while it is under
        way ends, unless it is an evaluation that can begin again; one that has left before goes on first."""
        if kind is CallKind.EVALUATE:  # its inputs may be those of the shape before, too
            self._membership.leave_after_last_step(None)
        if self._worker.departure.stays:
            self._membership.join_next(None)
        self._membership.check_call(kind)
        self._progress.other_call, self._progress.has_call_failed = kind, True
        try:
            self._worker.departure.raise_if_leaving()
            self._worker.calls.enter_call(kind, self._progress.step)
            with STEP_CLOCK.measure(_ACTIVITIES[kind]) if kind in _ACTIVITIES else nullcontext():
                yield
            self._progress.has_call_failed = False
        finally:
            self._progress.other_call = None

    def _check_optimizers(self, caller: str) -> None:
        if not self._updater.optimizers:
            raise missing_optimizer(caller)
