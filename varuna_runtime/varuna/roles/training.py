"""Training: this process trains one stage of one replica, together with all other ranks.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
import torch
from torch.optim import Optimizer

from varuna.assembly.assembly import agree_on_seed, assemble_rank, connect_stage, stages_of
from varuna.checkpoint import CheckpointRequest, StateScope
from varuna.checkpoint.script_states import Stateful
from varuna.data.batches import fetch_examples, follow_shape, renew_batch
from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.start_phases import StartPhases
from varuna.diagnostics.tensorboard import TensorBoardWriter
from varuna.distributed.agreement import BoundaryRequests, StepTotals, agree_on_totals
from varuna.distributed.calls import CallKind
from varuna.distributed.departure import GenerationEnded, PeerLost, end_process
from varuna.distributed.topology import share_of_batch, spans_of_micro_batches
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
from varuna.partition.model_io.batch import batch_size_of
from varuna.partition.tracing.retracer import Retracer
from varuna.pipeline.loss_weight import ExpectedWeight
from varuna.pipeline.micro_batches import MicroBatch, cut_inputs, cut_spans
from varuna.pipeline.pass_state import PassResult
from varuna.roles.checkpoints import TrainingCheckpoints, TrainingProgress
from varuna.roles.giving import end_as_holder
from varuna.roles.kept_shares import KeptShare
from varuna.roles.reshaping import (
    SurvivorStep,
    TrainingStep,
    can_hold_state,
    choose_totals,
    count_redone,
    describe_obstacle,
    describe_script_obstacle,
    fits_in_place,
    make_survivor_step,
    plan_rest,
)
from varuna.roles.role import apply_seed, missing_optimizer, report_ready
from varuna.roles.wrapped_model import WrappedModel
from varuna.worker.agent_link import GiveCommand, StateSources
from varuna_proto.environment import EXIT_PEER_LOST

__all__ = ["TrainingOptions", "TrainingRole"]

_log = structlog.get_logger("varuna")

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
        with keep_global_generators(self._device):
            self.assembly = assemble_rank(
                wrapped.model,
                wrapped.model_map,
                self._worker,
                device=self._device,
                precision=self._precision,
                values=wrapped.values,
            )
        stage, everyone = self.assembly.stage, self.assembly.everyone
        self._expected_weight = ExpectedWeight(self.assembly.replicas, self._device)
        self._progress = TrainingProgress(agree_on_seed(seed, everyone))
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
        self._is_ready = False
        self._is_broken = False
        self._newest_step: TrainingStep | None = None
        self._counting_steps = threading.Lock()
        self._committed_totals: StepTotals | None = None
        """Of the newest committed step."""
        self._held_bytes = 0
        self._other_call: CallKind | None = None
        """The call under way, unless it is a step."""
        self._give_command: GiveCommand | None = None
        """Given when the step under way had been agreed on: the script's next call gives the state."""
        if can_hold_state(environment):
            self._worker.departure.offer_to_stay(self._try_to_stay, self._find_obstacle)
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
        step = TrainingStep(inputs=inputs, clip_grad_max_norm=clip_grad_max_norm, began_ns=time.perf_counter_ns())
        while True:
            try:
                return self._run_step(step)
            except (GenerationEnded, PeerLost):
                if not self._worker.departure.stays:
                    raise
                self._go_on(step)

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
        self._report_step(step, step.totals)
        return step.totals.loss, step.overflow, gradient.norm

    def _begin_step(self, step: TrainingStep) -> None:
        """All that comes before the passes of a step."""
        self._check_optimizers("step")
        if self._is_broken:
            raise RuntimeError("an earlier step failed half-way, so the ranks may disagree: end the script")
        self._updater.check_gradients()
        clip_factor(0.0, step.clip_grad_max_norm)  # refuses a bad bound before any work is done
        self._newest_step = step
        self._worker.departure.raise_if_leaving()
        self._worker.calls.enter_call(CallKind.STEP, self._progress.step)
        self._updater.accumulation.inspect_script(self._updater.optimizers)
        self.checkpoints.save_automatic_checkpoint()
        self._report_ready()
        self._is_broken = True
        self._changes.begin_step()
        self._follow_changes()

    def _update(self, step: TrainingStep, totals: StepTotals, gradient: StepGradient) -> None:
        """Makes the update of an agreed step: from here on the state is that after the step."""
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
        step_ns = time.perf_counter_ns() - step.began_ns
        self._worker.report_step(
            number,
            totals.loss,
            examples=totals.examples,
            passed=step.passed,
            step_ns=step_ns,
            device=self._device,
            skipped=skipped,
        )
        self._scalars.write_step(
            number, totals.loss, step_ns / 1e9, examples=totals.examples, optimizers=self._updater.optimizers
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
                requests=self.checkpoints.boundary_requests(),
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

    def resume(self, *, allow_fresh_start: bool) -> int:
        self._check_optimizers("resume")
        with self._calling(CallKind.RESUME):
            self.checkpoints.resume_training(allow_fresh_start=allow_fresh_start)
        self._report_ready()
        return self._progress.step

    @contextmanager
    def _calling(self, kind: CallKind) -> Iterator[None]:
        """Around a call that all ranks make together and that is no step. A process that has to leave while it is under
        way ends; one that has left before goes on first."""
        if self._worker.departure.stays:
            self._go_on(None)
        self._other_call = kind
        try:
            self._worker.departure.raise_if_leaving()
            self._worker.calls.enter_call(kind, self._progress.step)
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
        obstacle = self._find_obstacle()
        if obstacle:
            _log.info(f"this process takes no part in the next generation and only gives its state: {obstacle}")
        with self._counting_steps:
            step = self._committed(newest)
        self._worker.link.report_generation_left(
            int(str(exit_.code)), step, self._held_bytes, gives_only=bool(obstacle)
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
        worker.end_membership(links_ended=self.assembly.disconnect(_LINKS_END_S))
        self.checkpoints.checkpointing.abandon_saves()
        phases.end_phase("leave")
        command = worker.link.wait_for_command()
        if isinstance(command, GiveCommand):
            self._give_state(command, step)
            return
        environment = command.environment
        if not fits_in_place(environment, before):
            raise RuntimeError(f"rank {environment.rank} of the next generation has another stage")
        phases.end_phase("wait")
        worker.join_next(environment, phases, self._try_to_stay, self._find_obstacle)
        self._catch_up(step)
        with keep_global_generators(self._device):
            self.assembly = connect_stage(self.assembly.stage, self._map, worker, self._device, self._precision)
        self._follow_generation()
        phases.end_phase("connect")
        sources = StateSources(kept_bytes=self._held_bytes)
        redone = 0 if step is None else step.redone
        worker.link.report_ready(self._committed(step), phases.durations_s, sources, micro_batches_redone=redone)
        _log.info(
            "this process goes on in the next generation",
            generation=environment.generation,
            rank=environment.rank,
            step=self._committed(step),
            micro_batches_redone=redone,
        )

    def _give_state(self, command: GiveCommand, step: TrainingStep | None) -> None:
        """Gives the state to new processes, which begin where this script is in its call of `step`, and ends this one.

        Returns only if that step has been agreed on, so that the script has to follow it first.
        """
        if step is None:
            raise RuntimeError("the script is between two steps, where no other process can begin")
        if step.totals is not None:
            self._give_command, step.was_interrupted = command, True
            return
        state, worker = self.checkpoints.training_state(), self._worker
        end_as_holder(state, self._progress.step, own=worker.environment, command=command, link=worker.link)

    def _committed(self, step: TrainingStep | None) -> int:
        """The newest step that this rank knows as committed."""
        is_agreed = step is not None and step.totals is not None and not step.is_updated
        return self._progress.step + is_agreed

    def _catch_up(self, step: TrainingStep | None) -> None:
        """Agrees with the other survivors on the newest committed step."""
        worker = self._worker
        own = make_survivor_step(step, self._committed(step), self._committed_totals)
        everyone = worker.topology.everyone
        texts = worker.rendezvous.exchange_values("survivor", everyone, own.to_json())
        survivors = [SurvivorStep.from_json(text) for text in texts]
        totals = choose_totals(own, survivors, is_reduced=step is not None and step.is_reduced)
        if step is None:
            return
        step.redone = 0
        if totals is not None:
            step.totals = self._committed_totals = totals
        if step.totals is None:  # it is run again
            step.is_reduced = False
            step.rest = plan_rest(survivors, worker.environment)
            step.redone = count_redone(step.rest, survivors, worker.environment)
            if step.rest is None or not step.rest.keeps_share:
                step.drop_share()
                for parameter in self.assembly.stage.parameters.values():
                    parameter.grad = None
        else:  # a rank that has begun the next step has dropped them, so no rank may follow them
            step.totals = replace(step.totals, requests=BoundaryRequests())
            step.was_interrupted = True

    def _follow_generation(self) -> None:
        """Everything that knows the other ranks knows those of the new generation from now on."""
        environment, assembly = self._worker.environment, self.assembly
        self._expected_weight.follow_replicas(assembly.replicas)
        self._changes.follow_ranks(assembly.everyone)
        self._non_finite.set_logging(logs=environment.rank == 0)
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
