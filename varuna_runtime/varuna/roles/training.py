"""Training: this process trains one stage of one replica, together with all other ranks.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
import torch
from torch import nn
from torch.optim import Optimizer

from varuna.assembly.assembly import agree_on_seed, assemble_alone, assemble_rank, connect_stage, stages_of
from varuna.checkpoint import CheckpointRequest, StateScope
from varuna.checkpoint.script_states import Stateful
from varuna.copies.rank_copies import RankCopies
from varuna.data.batches import fetch_examples, follow_shape, renew_batch
from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.start_phases import StartPhases
from varuna.diagnostics.step_clock import STEP_CLOCK, Activity
from varuna.diagnostics.tensorboard import TensorBoardWriter
from varuna.distributed.agreement import BoundaryRequests, StepTotals, agree_on_totals
from varuna.distributed.calls import CallKind
from varuna.distributed.departure import GenerationEnded, PeerLost, end_process
from varuna.distributed.topology import share_of_batch, spans_of_micro_batches
from varuna.holdings.inventory import HeldFiles
from varuna.model.fixed_module import ModelSurface
from varuna.model.script_changes import ScriptChanges
from varuna.model.tensor_swap import TensorSwap
from varuna.optim.host_parameters import HostParameters
from varuna.optim.non_finite_steps import NonFiniteSteps, check_max_non_finite_steps, keep_buffers_finite
from varuna.optim.optimizers import allow_empty_stages, check_parameters, log_left_out
from varuna.optim.parameter_updater import ParameterUpdater, StepGradient
from varuna.optim.precision import LossScaler
from varuna.optim.reduction import clip_factor
from varuna.optim.split_check import check_splittable
from varuna.optim.weight_average import WeightAverage, check_decay
from varuna.partition import Stage
from varuna.partition.model_io.batch import batch_size_of
from varuna.partition.tracing.retracer import Retracer
from varuna.pipeline.loss_weight import ExpectedWeight
from varuna.pipeline.micro_batches import MicroBatch, cut_inputs, cut_spans
from varuna.pipeline.pass_state import PassResult
from varuna.roles.checkpoints import TrainingCheckpoints, TrainingProgress
from varuna.roles.failing import ScriptHabits, are_finite
from varuna.roles.giving import end_as_holder, leave_in_memory
from varuna.roles.kept_shares import KeptShare, StepRest
from varuna.roles.moving import StageMove, StageParts, take_state
from varuna.roles.reshaping import (
    SurvivorStep,
    TrainingStep,
    add_step,
    can_hold_state,
    choose_totals,
    count_redone,
    describe_obstacle,
    describe_script_obstacle,
    explain_apart,
    fits_in_place,
    must_move,
    plan_rest,
)
from varuna.roles.role import apply_seed, missing_optimizer, report_ready
from varuna.roles.wrapped_model import WrappedModel
from varuna.worker.agent_link import GiveCommand, StateSources, StoreCommand
from varuna_proto.environment import EXIT_GENERATION_ENDED, EXIT_PEER_LOST, WorkerEnvironment
from varuna_proto.state_use import OTHER_STAGES

__all__ = ["TrainingOptions", "TrainingRole"]

_log = structlog.get_logger("varuna")

_ACTIVITIES = {CallKind.EVALUATE: Activity.EVALUATION, CallKind.CHECKPOINT: Activity.CHECKPOINT}
_LEAST_PATIENCE_S = 5.0
"""How long a replica that finishes its share waits for one of its ranks at least, before it leaves the share undone."""
_LINKS_END_S = 2.0
"""How long to wait for the threads of links whose connections are broken: they end within milliseconds."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train: the arguments of `Varuna` with these names. Raises ValueError for a bad value."""

    offload_optimizer: bool = False
    ema: float | None = None
    max_non_finite_steps: int = 10
    accumulate: bool = False

    def __post_init__(self) -> None:
        check_decay(self.ema)
        check_max_non_finite_steps(self.max_non_finite_steps)


class TrainingRole:
    """Trains this rank's stage. All ranks call the same methods in the same order."""

    def __init__(self, wrapped: WrappedModel, seed: int, options: TrainingOptions, scalars: TensorBoardWriter) -> None:
        """`seed`: the job's, if this is rank 0. `scalars`: where each step's figures go for TensorBoard."""
        self._worker, self._device, self._precision = wrapped.worker, wrapped.device, wrapped.precision
        environment = self._worker.environment
        self._non_finite = NonFiniteSteps(options.max_non_finite_steps, logs=environment.rank == 0)
        self._scalars = scalars
        joins = environment.joins_survivors
        assemble = assemble_alone if joins else assemble_rank
        with keep_global_generators(self._device):
            self.assembly = assemble(
                wrapped.model,
                wrapped.model_map,
                self._worker,
                device=self._device,
                precision=self._precision,
                values=wrapped.values,
            )
        stage, everyone = self.assembly.stage, self.assembly.everyone
        self._expected_weight = ExpectedWeight(self.assembly.replicas, self._device)
        self._progress = TrainingProgress(seed if joins else agree_on_seed(seed, everyone))
        host = HostParameters(stage.parameters) if options.offload_optimizer else None
        if self._worker.topology.p > 1:
            allow_empty_stages(self._device if host is None else torch.device("cpu"))
        self.parameters = stage.parameters if host is None else host.parameters
        self.average = None if options.ema is None else WeightAverage(self.parameters, options.ema)
        self._updater = ParameterUpdater(
            stage.parameters, self.parameters, host=host, average=self.average, accumulate=options.accumulate
        )
        self._swap = TensorSwap(stage, self.parameters)
        self.surface = ModelSurface(
            module=stage.module,
            parameters=self._swap.parameters,
            buffers=self._swap.buffers,
            device=self._device,
            seed=lambda: apply_seed(self._progress.seed, self._progress.step),
        )
        self._wrapped_map = self._map = wrapped.model_map
        self._trace_digest = wrapped.trace_digest
        self._retracer = Retracer(wrapped.model, wrapped.examples, stages_of(self._worker, self._section_count))
        self._changes = ScriptChanges(
            wrapped.model,
            stage.module,
            stage.parameters,
            given_out=self.parameters,
            model_map=wrapped.model_map,
            everyone=everyone,
        )
        self.checkpoints = TrainingCheckpoints(
            wrapped, self.assembly, self._updater, changes=self._changes, progress=self._progress
        )
        STEP_CLOCK.restart()
        self._stage_parts = StageParts(
            updater=self._updater,
            swap=self._swap,
            changes=self._changes,
            retracer=self._retracer,
            checkpoints=self.checkpoints,
        )
        self.follow_surface: Callable[[ModelSurface], None] = lambda surface: None
        """Called with what the script sees of the model when that is another stage."""
        self._held: HeldFiles | None = None
        """The state before this process moved to its stage, until all ranks have agreed on a step there."""
        self._unmoved: WorkerEnvironment | None = None
        """Of the rank that it was, while it moves to another stage, or when it could not: it can take no rank."""
        self._is_between_stages = False
        """Whether it has only the state before, and no stage."""
        self._awaited_in = CallKind.RESUME if joins else None
        """The call of the script in which survivors wait for this new process; None: it is one of them."""
        self._first_rest: StepRest | None = None
        """What this new process runs of the step in which it begins; None: its share."""
        self._has_left = False
        self._is_ready = False
        self._is_broken = False
        self._newest_step: TrainingStep | None = None
        self._counting_steps = threading.Lock()
        self._committed_totals: StepTotals | None = None
        """Of the newest committed step."""
        self._held_bytes = 0
        self._other_call: CallKind | None = None
        """The call under way, unless it is a step."""
        self._copies: RankCopies | None = None
        """Of the present generation; None: before its first step here, or no copies are kept."""
        self._give_command: GiveCommand | StoreCommand | None = None
        """Given when the step under way had been agreed on: the script's next call gives the state."""
        self._habits = ScriptHabits()
        if can_hold_state(environment):
            self._worker.departure.offer_to_stay(self._try_to_stay, self._find_obstacle)
            self._worker.link.store_on_failure(self._store_after_failure)
        if not joins:
            self._worker.phases.end_phase("connect")

    @property
    def loss_scale(self) -> float:
        return self._updater.loss_scale

    @property
    def _section_count(self) -> int:
        return len(self._wrapped_map.sections)

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
        check_parameters(optimizers, self.parameters)
        for optimizer in optimizers:
            check_splittable(optimizer, self._worker.environment, self._section_count)
        if self._worker.topology.replica == 0:
            log_left_out(optimizers, self.parameters)
        self._updater.set_optimizers(optimizers)
        if scaler is not None:
            self._updater.scaler = scaler
            self.checkpoints.hold_scaler(scaler)

    # Steps

    def train_step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None) -> tuple[float, bool, float]:
        step = TrainingStep(inputs=inputs, clip_grad_max_norm=clip_grad_max_norm, rest=self._first_rest)
        self._first_rest = None
        while True:
            try:
                return self._run_step(step)
            except (GenerationEnded, PeerLost):
                if not self._worker.departure.stays:
                    raise
            self._go_on(step)  # when the exception is gone, whose frames hold parts of the stage

    def _run_step(self, step: TrainingStep) -> tuple[float, bool, float]:
        """Runs what is left of the step."""
        if step.totals is None:
            self._begin_step(step)
            totals = self._pass_and_agree(step)
            if totals.changed:
                self._changes.exchange_changes()
                self._follow_changes()
                totals = self._pass_and_agree(step)
            step.totals = self._committed_totals = totals
        gradient = self._step_gradient(step.totals)
        if not step.is_updated:
            self._update(step, step.totals, gradient)
            if not step.was_interrupted:  # else they have been equal since the ranks connected
                self.assembly.equalize_buffers()
        self._updater.watch_gradients()
        self._is_broken = False
        self.checkpoints.set_boundary_requests(step.totals.requests)
        if self._copies is not None:
            self._copies.record_agreement(is_any_busy=step.totals.requests.copying)
        self._report_step(step, step.totals)
        self._habits.end_step(self._updater.optimizers, self.checkpoints.registered)
        return step.totals.loss, step.overflow, gradient.norm

    def _begin_step(self, step: TrainingStep) -> None:
        """All that comes before the passes of a step."""
        self._check_optimizers("step")
        if self._is_broken:
            raise RuntimeError("an earlier step failed half-way, so the ranks may disagree: end the script")
        self._updater.check_gradients()
        clip_factor(0.0, step.clip_grad_max_norm)  # refuses a bad bound before any work is done
        self._newest_step = step
        self._habits.begin_step(self._updater.optimizers, self.checkpoints.registered)
        self._worker.departure.raise_if_leaving()
        self._check_awaited(CallKind.STEP)
        self._awaited_in = None
        self._worker.calls.enter_call(CallKind.STEP, self._progress.step)
        self._updater.accumulation.inspect_script(self._updater.optimizers)
        with STEP_CLOCK.measure(Activity.CHECKPOINT):
            self.checkpoints.save_automatic_checkpoint()
        STEP_CLOCK.begin_step()
        self._report_ready()
        self._is_broken = True
        self._changes.begin_step()
        self._follow_changes()
        self._begin_copies()

    def _begin_copies(self) -> None:
        """Begins to copy the state to its keeper, if it is time for that. The step's passes do not change it."""
        worker = self._worker
        if self._copies is None and worker.environment.keepers and can_hold_state(worker.environment):
            self._copies = RankCopies(
                worker,
                self._device,
                count_state_bytes=lambda: self._held_bytes,
                is_pipeline_sending=lambda: self.assembly.links.are_sending,
            )
        elif self._copies is not None and not self._updater.accumulation.is_pending:
            self._copies.begin_round(self._progress.step, self.checkpoints.training_state)

    def _update(self, step: TrainingStep, totals: StepTotals, gradient: StepGradient) -> None:
        """Makes the update of an agreed step: from here on the state is that after the step."""
        self._held = None
        # The norm covers every gradient of the model and is the same on all ranks, so all ranks decide alike.
        step.overflow = self._non_finite.decide_skip(
            self._progress.step + 1, totals.loss, gradient.norm, self._updater.scaler
        )
        self._expected_weight.learn_from_batch(totals.weight, totals.examples)
        self._updater.finish_step(gradient, step.clip_grad_max_norm, skip=step.overflow)
        with self._counting_steps:
            self._progress.step += 1
            self._progress.samples.add_step(self._worker.environment.plan.global_batch or totals.examples)
            step.is_updated = True

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

    def _report_step(self, step: TrainingStep, totals: StepTotals) -> None:
        assert step.passed is not None
        if not self._held_bytes and not step.overflow:  # the optimizer's state is there after its first update
            self._held_bytes = self.checkpoints.count_bytes()
        number, skipped = self._progress.step, step.overflow and self._non_finite.in_a_row > 0
        times = STEP_CLOCK.end_step()
        self._worker.report_step(
            number,
            totals.loss,
            examples=totals.examples,
            passed=step.passed,
            times=times,
            device=self._device,
            skipped=skipped,
            copied_step=0 if self._copies is None else self._copies.whole_step,
        )
        self._scalars.write_step(
            number, totals.loss, times.whole_ns / 1e9, examples=totals.examples, optimizers=self._updater.optimizers
        )

    def _pass_and_agree(self, step: TrainingStep) -> StepTotals:
        """Runs forward and backward and agrees with the other ranks; `.grad` then holds what was accumulated, too.

        If a rank has seen a change by the script (`StepTotals.changed`), everything is as it was before.
        """
        accumulation, stage = self._updater.accumulation, self.assembly.stage
        with keep_buffers_finite(list(stage.written.homes.values())), self._passing():
            accumulation.hold_gradients(stage.parameters.values())
            scale = self.loss_scale
            try:
                global_batch = self._train_pass(step, scale)
                assert step.passed is not None
                self.assembly.reducer.reduce_gradients(step.drop_share)
                self.assembly.timeline.end_step()
                if accumulation.is_pending:
                    accumulation.add_held_gradients(scale / self._expect_weight(global_batch, 0.0, 0))
                # What the passes have written counts only once all ranks agree; without such buffers nothing is open.
                step.is_reduced = not stage.written.homes
                if self._copies is not None:
                    self._copies.finish_capture()
                totals = self._agree_on(step.passed)
            except (GenerationEnded, PeerLost):
                stage.written.discard_writes()
                raise
            if totals.changed:
                step.is_reduced, step.rest = False, None
                stage.written.discard_writes()
                accumulation.restore_gradients(stage.parameters.values())
            else:
                stage.written.write_back()
        return totals

    def _train_pass(self, step: TrainingStep, loss_scale: float) -> int:
        """Runs forward and backward of what this replica has to run; adds to what is kept of the step.

        Returns how many examples the global batch is expected to have.
        """
        kept, step.kept, rest, step.has_begun = step.kept, None, step.rest, True
        if rest is None or kept is None:
            kept = None
            for parameter in self.assembly.stage.parameters.values():
                parameter.grad = None
        micro_batches = self._cut_share(step)
        global_batch = self._worker.environment.plan.global_batch or max(batch_size_of(step.inputs), 1)
        may_keep = self._may_keep()
        with self._finishing_share() if may_keep else nullcontext():
            passed = self.assembly.engine.run_training_pass(
                micro_batches,
                expected_weight=partial(self._expect_weight, global_batch)
                if rest is None
                else lambda weight, examples: rest.expected_weight,
                seed=self._progress.seed,
                step=self._progress.step + 1,
                loss_scale=loss_scale,
                before_last_backward=self.assembly.reducer.mark_last_backward,
                write_back_buffers=False,
            )
            share = KeptShare(tuple(micro_batch.index for micro_batch in micro_batches), passed)
            share = share if kept is None else kept.join(share)
            step.passed, step.kept = share.passed, share if may_keep else None
        return global_batch

    def _cut_share(self, step: TrainingStep) -> list[MicroBatch]:
        """The micro-batches of the step that this replica has to run."""
        environment = self._worker.environment
        if step.rest is None:
            step.inputs = renew_batch(step.inputs)
            sizes, first = share_of_batch(batch_size_of(step.inputs), environment, self._worker.topology.replica)
            return cut_inputs(step.inputs, sizes, first, first * environment.plan.micro_batch)
        spans = spans_of_micro_batches(step.rest.numbers, environment)
        return cut_spans(fetch_examples(step.inputs, spans.values()), spans) if spans else []

    def _may_keep(self) -> bool:
        """Whether what this rank runs of the step stays valid when ranks of other replicas are lost."""
        return (
            self._worker.topology.d > 1
            and self._worker.departure.can_stay
            and not self.assembly.stage.written.homes
            and not self._find_obstacle()
        )

    def _finishing_share(self) -> AbstractContextManager[None]:
        """Around a pass that is finished when another replica has lost a rank."""
        if self.assembly.stage.weighted and not self._expected_weight.is_known:  # the replicas exchange it in the pass
            return nullcontext()
        patience_s = _LEAST_PATIENCE_S + 3 * self.assembly.engine.longest_bubble_s
        return self._worker.departure.finish_first(self._worker.topology.mates, patience_s)

    def _find_obstacle(self) -> str:
        """Why this process cannot go on in place; empty: it can."""
        return describe_obstacle(
            None if self._newest_step is None else self._newest_step.inputs,
            accumulates=self._updater.accumulation.is_active,
            unclean_ends=self._worker.unclean_ends,
        )

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
                requests=replace(
                    self.checkpoints.boundary_requests(), copying=self._copies is not None and self._copies.is_busy
                ),
                changed=self._changes.are_pending,
            ),
        )

    def _expect_weight(self, global_batch: int, weight: float, examples: int) -> float:
        """About what a global batch weighs; `weight` and `examples` are of this rank's first micro-batch."""
        if not self.assembly.stage.weighted:
            return float(global_batch)
        return self._expected_weight.estimate_sum(global_batch, weight, examples)

    def _follow_changes(self) -> None:
        """Makes the stage run as the script has changed the model, once all ranks know of the change."""
        if not self._changes.needs_trace:
            return
        with keep_global_generators(self._device), self._precision.dry_run_context():
            self._map = model_map = self._changes.trace_model(self._retracer, self._wrapped_map)
        self._precision.check_parameters(self.assembly.stage.parameters.items())
        with self._swap.change_pass_tensors():
            self.assembly.apply_map(model_map, self._updater.host)
        self.checkpoints.hold_stage(model_map)
        for optimizer in self._updater.optimizers:
            self._changes.refuse_foreign_parameters(optimizer)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Around a pass: the stage computes with what the script has left in the model."""
        if self._updater.host is not None:
            self._updater.host.copy_to_device()
        with self._swap.use_pass_tensors(), self._precision.pass_context():
            yield

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None, *, ema: bool) -> float:
        if ema and self.average is None:
            raise ValueError("evaluate(ema=True), but no average is kept: keep one with Varuna(..., ema=0.999)")
        with self._calling(CallKind.EVALUATE):
            return self._evaluate_together(inputs, batch_size, ema=ema)

    def _evaluate_together(self, inputs: Mapping[str, Any], batch_size: int | None, *, ema: bool) -> float:
        inputs = renew_batch(inputs)
        sizes, first = share_of_batch(batch_size_of(inputs), self._worker.environment, self._worker.topology.replica)
        parameters = self.assembly.stage.parameters
        averaged = self.average.exchange_values(parameters) if ema and self.average is not None else nullcontext()
        with self.assembly.evaluation_mode(), self._passing(), averaged:
            passed = self.assembly.engine.run_evaluation_pass(
                cut_inputs(inputs, sizes, first), self._worker.link.report_evaluated_micro_batch
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
        return totals.loss

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
            self.checkpoints.load_checkpoint(url, step)
            self._forget_copies()

    def resume(self, *, allow_fresh_start: bool) -> int:
        self._check_optimizers("resume")
        if self._awaited_in is CallKind.RESUME:
            self._join_survivors()
            return self._progress.step
        with self._calling(CallKind.RESUME):
            self.checkpoints.resume_training(allow_fresh_start=allow_fresh_start)
            self._forget_copies()
        self._report_ready()
        return self._progress.step

    def _forget_copies(self) -> None:
        """All ranks have another state now, perhaps of an older step."""
        if self._copies is not None:
            self._copies.forget_copies()

    @contextmanager
    def _calling(self, kind: CallKind) -> Iterator[None]:
        """Around a call that all ranks make together and that is no step. A process that has to leave while it is under
        way ends; one that has left before goes on first."""
        if self._worker.departure.stays:
            self._go_on(None)
        self._check_awaited(kind)
        self._other_call = kind
        try:
            self._worker.departure.raise_if_leaving()
            self._worker.calls.enter_call(kind, self._progress.step)
            with STEP_CLOCK.measure(_ACTIVITIES[kind]) if kind in _ACTIVITIES else nullcontext():
                yield
        finally:
            self._other_call = None

    # Going on in the next generation

    def _try_to_stay(self, exit_: GenerationEnded | PeerLost) -> bool:
        """Whether this process goes on in the next generation. Any thread calls it when the worker leaves this one."""
        if not self._is_ready:
            return False
        self._report_script_obstacle()
        if self._updater.accumulation.is_pending:
            return False
        if self._other_call is not None:
            _log.info(f"this process ends with its generation: it is in {self._other_call.name.lower()}()")
            return False
        newest = self._newest_step
        with self._counting_steps:
            step, self._has_left = self._committed(newest), True
            is_moving = self._unmoved is not None
        obstacle = "it was to take another stage" if is_moving else self._find_obstacle()
        if obstacle:
            _log.info(f"this process takes no part in the next generation and only gives its state: {obstacle}")
        self._worker.link.report_generation_left(
            int(str(exit_.code)),
            step,
            self._held_bytes,
            gives_only=bool(obstacle),
            copies=[(held.inventory.rank, held.inventory.step) for held in self._list_copies()],
        )
        return True

    def _report_script_obstacle(self) -> None:
        newest, accumulates = self._newest_step, self._updater.accumulation.is_active
        if newest is not None and (reason := describe_script_obstacle(newest.inputs, accumulates=accumulates)):
            self._worker.link.report_script_obstacle(reason)

    def _go_on(self, step: TrainingStep | None) -> None:
        """Takes part in the next generation, with the state of the newest committed step. `step`: the call under way.

        Returns when all ranks of that generation stand there, or when this process has to complete a step before it can
        give its state. Raises as a worker that leaves when that cannot be done.
        """
        while True:
            try:
                self._rejoin(step)
            except (GenerationEnded, PeerLost):
                if not self._worker.departure.stays:
                    raise
            except (RuntimeError, TimeoutError, ValueError) as error:
                _log.warning("this process cannot go on in the next generation: it ends", reason=str(error))
                end_process(EXIT_PEER_LOST)
            else:
                return

    def _rejoin(self, step: TrainingStep | None) -> None:
        worker, before, phases = self._worker, self._worker.environment, StartPhases()
        if self._give_command is not None:
            self._give_state(self._give_command, step)
        self._is_broken = False
        worker.end_membership(links_ended=self._is_between_stages or self.assembly.disconnect(_LINKS_END_S))
        if self._copies is not None:
            self._copies.finish_capture()
        self.checkpoints.checkpointing.abandon_saves()
        phases.end_phase("leave")
        command = worker.link.wait_for_command()
        if isinstance(command, GiveCommand | StoreCommand):
            self._give_state(command, step)
            return
        environment = command.environment
        if self._unmoved is not None or not fits_in_place(environment, before):
            raise RuntimeError(f"rank {environment.rank} of the next generation needs another process")
        phases.end_phase("wait")
        with self._counting_steps:
            self._has_left = False
        worker.join_next(environment, phases, self._try_to_stay, self._find_obstacle)
        survivors = self._catch_up(step, before.plan.micro_batch)
        self._held, peer_bytes, stage = None, 0, self.assembly.stage
        if must_move(survivors, self._own_stages):
            del stage  # nothing may keep it but the assembly
            stage, peer_bytes = self._move(survivors, before)
            phases.end_phase("load")
        elif environment.survivors:
            self._give_to_new(survivors, before)
            phases.end_phase("load")
        self._connect_anew(stage)
        sources = StateSources(kept_bytes=max(self._held_bytes - peer_bytes, 0), peer_bytes=peer_bytes)
        redone = 0 if step is None else step.redone
        worker.link.report_ready(self._committed(step), phases.durations_s, sources, micro_batches_redone=redone)
        _log.info(
            "this process goes on in the next generation",
            generation=environment.generation,
            rank=environment.rank,
            step=self._committed(step),
            micro_batches_redone=redone,
        )

    def _give_state(self, command: GiveCommand | StoreCommand, step: TrainingStep | None) -> None:
        """Gives the state to new processes, which begin where this script is in its call of `step`, or leaves it to
        them in memory, and ends this one.

        Returns only if that step has been agreed on, so that the script has to follow it first.
        """
        if step is None:
            raise RuntimeError("the script is between two steps, where no other process can begin")
        if step.totals is not None:
            self._give_command, step.was_interrupted = command, True
            return
        state, worker = self.checkpoints.training_state(), self._worker
        if isinstance(command, StoreCommand):
            leave_in_memory(
                state,
                self._progress.step,
                own=self._unmoved or worker.environment,
                published_as=worker.environment,
                held=self._held,
            )
            end_process(EXIT_GENERATION_ENDED)
            return
        end_as_holder(
            state,
            self._progress.step,
            own=self._unmoved or worker.environment,
            published_as=worker.environment.rank,
            command=command,
            link=worker.link,
            held=self._held,
            copies=self._list_copies(),
        )

    def _store_after_failure(self) -> None:
        """The script has raised an exception: leaves the state in memory if it is that after a step, for a script that
        begins with the next one."""
        step, environment = self._newest_step, self._worker.environment
        if step is None or self._worker.departure.exit_code is not None:
            return
        if self._is_broken:
            is_whole = step.totals is None  # no update has begun
        else:
            is_whole = self._habits.is_between_steps(self._updater.optimizers, self.checkpoints.registered)
        is_whole &= self._other_call is None and not self._updater.accumulation.is_pending
        is_whole &= self._held is None and self._unmoved is None and not self._is_between_stages
        if not is_whole or not are_finite(self.parameters.values()):
            _log.warning("the script failed where its state is of no use to another process")
            return
        leave_in_memory(
            self.checkpoints.training_state(), self._progress.step, own=environment, published_as=environment
        )

    def _list_copies(self) -> list[HeldFiles]:
        """What this process keeps for others; nothing once it was to take another stage, with other ranks."""
        return [] if self._copies is None or self._unmoved is not None else self._copies.list_copies()

    def _connect_anew(self, stage: Stage) -> None:
        """Connects this rank, with its state, to the others of its generation."""
        with keep_global_generators(self._device):
            self.assembly = connect_stage(stage, self._map, self._worker, self._device, self._precision)
        self._follow_generation()
        self._worker.phases.end_phase("connect")

    def _give_to_new(self, survivors: Sequence[SurvivorStep], before: WorkerEnvironment) -> None:
        """Gives new processes the state of their stages, while all others keep theirs. `before`: as for `_move`.

        If one cannot take it, all leave again, and new processes take the state.
        """
        self._require_together(survivors)
        move = StageMove(self._worker, self._stage_parts, self._device)
        try:
            _, reason = move.share_state(self.assembly.stage, self._progress.step, before)
            self._require_success(reason or move.keep_stage())
        finally:
            move.close()

    def _join_survivors(self) -> None:
        """Takes part in a generation of survivors with this new process, whose script resumes: it takes the state of
        its stage from them, and goes on where they are in their scripts: at the beginning of a step.

        If that cannot be, all leave again, and new processes take the state.
        """
        worker, stage = self._worker, self.assembly.stage
        worker.phases.end_phase("script")
        survivors = self._catch_up(None, 0)
        self._require_together(survivors)
        loaded, reason = take_state(worker, self.checkpoints.training_state())
        self._require_success(reason)
        assert loaded is not None
        self.checkpoints.continue_from(loaded)
        self._changes.begin_step()  # what was loaded of them is agreed on by the others
        for survivor in survivors:
            if survivor.weight_per_example is not None:
                self._expected_weight.follow_others(survivor.weight_per_example)
        if not must_move(survivors, self._own_stages):
            self._first_rest = plan_rest(survivors, worker.environment)
        worker.phases.end_phase("load")
        self.assembly.disconnect(_LINKS_END_S)
        self._connect_anew(stage)
        self._awaited_in = CallKind.STEP
        self._report_ready()

    def _check_awaited(self, kind: CallKind) -> None:
        """Leaves, together with the survivors, where the script of this new process makes another call than theirs."""
        if self._awaited_in not in (None, kind):
            awaited = self._awaited_in.name.lower()
            self._require_success(
                f"a new process calls {kind.name.lower()}() before {awaited}(), where the others wait for it"
            )

    def _move(self, survivors: Sequence[SurvivorStep], before: WorkerEnvironment) -> tuple[Stage, int]:
        """Takes another stage, together with all other ranks. `before`: of the rank that this process was.

        Returns the stage, and the bytes that came from other processes. If one rank cannot move, all leave again, with
        the state of the stages that they had. New processes take it.
        """
        worker = self._worker
        with self._counting_steps:
            self._unmoved, has_left = before, self._has_left
        if has_left:
            worker.departure.wait_until(lambda: False)
        self._require_together(survivors)
        move = StageMove(worker, self._stage_parts, self._device)
        try:
            held, reason = move.share_state(self.assembly.stage, self._progress.step, before)
            self._require_success(reason)
            self._held, self._is_between_stages = held, True
            self._show_surface({}, {})
            with keep_global_generators(self._device):
                stage, reason = move.take_stage(self._release_stage(), self._map)
            self._require_success(reason)
            assert stage is not None
        finally:
            move.close()
        self._show_surface(self._swap.parameters, self._swap.buffers)
        self._held_bytes = self.checkpoints.count_bytes()
        self._unmoved, self._is_between_stages = None, False
        return stage, move.peer_bytes

    def _require_together(self, survivors: Sequence[SurvivorStep]) -> None:
        if reason := explain_apart(survivors):
            self._leave_unmoved(reason)

    def _require_success(self, reason: str) -> None:
        """`reason`: why ranks cannot take their stages in place, which is the script's; empty: they have."""
        if reason:
            self._worker.link.report_script_obstacle(OTHER_STAGES + reason)
            self._leave_unmoved(reason)

    def _leave_unmoved(self, reason: str) -> None:
        """Leaves the generation, whose ranks cannot take their stages, so that new processes take the state."""
        departure = self._worker.departure
        departure.leave_generation(GenerationEnded(f"the ranks cannot take other stages in place: {reason}"))
        departure.raise_if_leaving()

    def _release_stage(self) -> Stage:
        """The stage, whose connections have ended; nothing else here keeps it."""
        stage = self.assembly.stage
        del self.assembly
        return stage

    def _show_surface(self, parameters: dict[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.surface = replace(self.surface, parameters=parameters, buffers=buffers)
        self.follow_surface(self.surface)

    @property
    def _own_stages(self) -> tuple[range, ...]:
        """The sections of each stage of the present generation."""
        return stages_of(self._worker, self._section_count)

    def _committed(self, step: TrainingStep | None) -> int:
        """The newest step that this rank knows as committed."""
        is_agreed = step is not None and step.totals is not None and not step.is_updated
        return self._progress.step + is_agreed

    def _catch_up(self, step: TrainingStep | None, micro_batch: int) -> list[SurvivorStep]:
        """Agrees with the other survivors on the newest committed step; returns where all of them stand.

        `micro_batch`: the examples in each of those that are kept of the step.
        """
        worker = self._worker
        sections = self.assembly.stage.sections
        own = SurvivorStep(
            committed=self._committed(step),
            totals=self._committed_totals,
            sections=(sections.start, sections.stop),
            micro_batch=micro_batch,
            weight_per_example=self._expected_weight.per_example,
            trace_digest=self._trace_digest,
            is_new=self._awaited_in is not None,
        )
        own = add_step(own, step)
        everyone = worker.topology.everyone
        texts = worker.rendezvous.exchange_values("survivor", everyone, own.to_json())
        survivors = [SurvivorStep.from_json(text) for text in texts]
        totals = choose_totals(own, survivors, is_reduced=step is not None and step.is_reduced)
        if step is None:
            return survivors
        step.redone = 0
        if totals is not None:
            step.totals = self._committed_totals = totals
        if step.totals is None:  # it is run again
            step.is_reduced = False
            moves = must_move(survivors, self._own_stages)
            step.rest = None if moves else plan_rest(survivors, worker.environment)
            step.redone = count_redone(step.rest, survivors, worker.environment)
            if step.rest is None or not step.rest.keeps_share:
                step.drop_share()
                for parameter in self.assembly.stage.parameters.values():
                    parameter.grad = None
        else:  # a rank that has begun the next step has dropped them, so no rank may follow them
            step.totals = replace(step.totals, requests=BoundaryRequests())
            step.was_interrupted = True
        return survivors

    def _follow_generation(self) -> None:
        """Everything that knows the other ranks knows those of the new generation from now on."""
        environment, assembly = self._worker.environment, self.assembly
        if self._copies is not None:
            self._copies.finish_capture()
            self._copies = None
        self._expected_weight.follow_replicas(assembly.replicas)
        self._changes.follow_ranks(assembly.everyone)
        self._non_finite.set_logging(logs=environment.rank == 0)
        if environment.survivors:
            self._non_finite.count_anew()
        self._scalars = TensorBoardWriter(environment, os.environ)
        self.checkpoints.follow_ranks(assembly.everyone, self._map)
        follow_shape(environment)

    def _check_optimizers(self, caller: str) -> None:
        if not self._updater.optimizers:
            raise missing_optimizer(caller)

    def _report_ready(self) -> None:
        """Reports once that the script has prepared everything."""
        if self._is_ready:
            return
        self._is_ready = True
        environment = self._worker.environment
        if environment.checkpoint_url and environment.generation > 1 and not self.checkpoints.were_loaded:
            _log.warning("the script trains from step 0 again: call resume() after set_optimizer() to continue")
        if self._progress.step:
            self._held_bytes = self.checkpoints.count_bytes()
        report_ready(self._worker, self._progress.step, self.checkpoints.sources)
