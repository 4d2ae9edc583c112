"""`Varuna`: the user's model, trained by all workers of the generation together.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.accumulation import Accumulation
from varuna.agreement import Totals, agree
from varuna.assembly import agreed_seed, assemble, stages_of
from varuna.averaging import AVERAGE_STATE, WeightAverage, check_decay
from varuna.calibrating import Calibrating
from varuna.calls import Operation
from varuna.checkpoint import Asked, CheckpointError, Loaded, Per, Place, TrainingState, hugging_face
from varuna.checkpointing import Checkpointing, Registered, Stateful, held_state, state_dict_names
from varuna.example_inputs import example_maker
from varuna.generators import global_generators_kept
from varuna.inspecting import Inspecting, report_refusal
from varuna.launch import worker_environment
from varuna.module_view import ModuleView, Shown
from varuna.non_finite import NonFiniteSteps, buffers_kept_finite, non_finite_anywhere
from varuna.offload import HostParameters
from varuna.optim import clip_factor, scale_gradients
from varuna.optimizer_check import require_splittable
from varuna.optimizers import Optimizers, allow_empty_stages, check_parameters, listed, report_left_out
from varuna.partition import PartitionError, trace
from varuna.partition.batch import batch_size_of
from varuna.partition.initialise import derived_seed
from varuna.partition.retrace import Retracer
from varuna.pipeline.engine import PassResult, cut_inputs
from varuna.pipeline.weights import ExpectedWeight
from varuna.precision import LossScaler, Precision
from varuna.pretrained import Weights
from varuna.resting import RestingModules
from varuna.same_trace import require_same_trace
from varuna.sample_cursor import SampleCount
from varuna.scalars import Scalars
from varuna.script_changes import ScriptChanges
from varuna.stepping import GradientsLeft, step_optimizers, take_over_steps
from varuna.topology import share_of_batch
from varuna.worker import Worker, choose_device, make_current
from varuna_proto.environment import Mode

__all__ = ["Varuna"]

_log = structlog.get_logger("varuna")

_TRACE_EXAMPLES = 2
"""Examples in the batch that the dry run is shown."""

_CHANGES = "varuna.script_changes"
"""The name under which checkpoints keep what the script has changed of the model since wrapping it."""

_LOSS_SCALE = "varuna.loss_scale"
"""The name under which checkpoints keep the state of the loss scale."""


class Varuna(ModuleView):
    """Trains `model` as one stage of one replica of a P×D job; in a plain process, alone (P = D = 1).

    Wrap the model before making the optimizer: `parameters()` are those of this worker's stage. What the launcher
    knows may be left out; what is given must agree with it.

    Args:
        model: returns its loss, the mean over the examples of its inputs; or `(loss, weight)`, where the loss is a mean
            over something else (tokens), and the weight their number: see `step`. On the CPU, or on `meta`: then its
            modules initialise what is this stage's, and nothing else of it is ever in memory.
        stage_to_rank_map: ranks of each stage, joined by `,` and `;`.
        stages: P, in place of the map: under torchrun and its like, whose ranks are then numbered replica by replica.
        get_batch_fn: `get_batch_fn(size, device="cpu")` gives example inputs, a dict for `model(**inputs)`; or one
            such dict, of any batch size.
        batch_size: B.
        chunk_size: examples in a micro-batch.
        fp16: mixed precision with fp16: parameters and optimizer stay fp32, and the loss is scaled (`set_optimizer`).
        local_rank, device: index of the CUDA device; -1: the launcher's.
        shared_weights: pairs of parameter names that train as one. Parameters that share memory are found without it.
        from_cache: False measures the model anew when the job first starts, even where the manager has its profile.
        dtype: what the forward's matrix products run in; `torch.bfloat16` is mixed precision without a loss scale.
        offload_optimizer: keep the optimizer and its state in host memory: `parameters()` are then copies there.
        cut_points: how many to find in a model without CutPoints; None: as its repeated blocks have it; 0: none.
        weights: path or URL of pretrained weights: a folder that `save_pretrained` has written, or one `.safetensors`
            file. Each stage reads its own.
        ema: keep an exponential moving average of the parameters with this decay (0.999, say), updated after each step
            that the optimizer makes; `evaluate(..., ema=True)` and `varuna export --ema` use it.
        max_non_finite_steps: so many steps in a row are skipped whose loss or gradient is not finite. One more raises
            FloatingPointError; 0: the first one does.
        accumulate: the script's own `optimizer.step()` makes the updates, each from the mean over all `step`s since the
            last. Without it, a loop of the usual form, `if (i + 1) % n == 0: optimizer.step()`, is seen.
        random_by_example: what forward draws (dropout) belongs to examples, so it is the same for every size of the
            micro-batches; False: to micro-batches, and a job keeps the size that it begins with.

    The global random generators are afterwards as they were before, on every rank.

    Raises:
        ValueError: an argument is missing, contradicts the launcher, or does not fit the model; or this rank has traced
            another model than rank 0.
        varuna.partition.PartitionError: the model cannot be cut as it stands.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str | None = None,
        get_batch_fn: Callable[..., Mapping[str, Any]] | Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        chunk_size: int | None = None,
        fp16: bool = False,
        local_rank: int = -1,
        device: int | str | torch.device | None = -1,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        from_cache: bool = True,
        *,
        dtype: torch.dtype | None = None,
        offload_optimizer: bool = False,
        cut_points: int | None = None,
        weights: str | os.PathLike[str] | None = None,
        stages: int | None = None,
        ema: float | None = None,
        max_non_finite_steps: int = 10,
        accumulate: bool = False,
        random_by_example: bool = True,
    ) -> None:
        super().__init__()
        check_decay(ema)
        get_batch = example_maker(get_batch_fn)
        environment = worker_environment(
            stage_to_rank_map=stage_to_rank_map, stages=stages, batch_size=batch_size, chunk_size=chunk_size
        )
        self._non_finite = NonFiniteSteps(max_non_finite_steps, logs=environment.rank == 0)
        self._accumulation = Accumulation(accumulate)
        self._scalars = Scalars(environment, os.environ)
        self._worker = Worker.join(environment)
        inspected = environment.mode is Mode.INSPECT
        self._device = make_current(choose_device(environment, None if inspected else device, local_rank))
        self._precision = Precision.of(fp16, dtype, self._device)
        self._precision.check_parameters(model.named_parameters())
        try:
            with global_generators_kept(self._device), self._precision.dry_run():
                examples = get_batch(_TRACE_EXAMPLES)
                model_map = trace(model, examples, shared_weights=shared_weights or (), cut_points=cut_points)
        except PartitionError as error:
            if inspected:
                report_refusal(environment, error)
            raise
        model_map = replace(model_map, random_by_example=random_by_example)
        self._worker.phases.done("trace")
        if environment.world_size > 1:
            require_same_trace(model, model_map, examples, self._precision, self._worker.rendezvous, environment.rank)
        self._sections = len(model_map.sections)
        self._optimizers: tuple[Optimizer, ...] = ()
        self._scaler: LossScaler | None = None
        self._step = 0
        self._samples = SampleCount()
        self._seed = torch.initial_seed()
        self._gradients_left = GradientsLeft()
        self._registered = Registered()
        self._said_ready = False
        self._resumed = False
        self._broken = False
        self._instead: Calibrating | Inspecting | None = None  # of training
        self._parameters_here: Mapping[str, nn.Parameter]
        names = state_dict_names(model, model_map)
        values = None if weights is None else Weights(weights, model, names, tells=environment.rank == 0)
        if inspected:
            self._parameters_here = dict(model.named_parameters())
            self._show_model(model, self._parameters_here, dict(model.named_buffers()))
            self._instead = Inspecting(environment, model, model_map, get_batch, self._device, self._precision)
            return
        if environment.mode is Mode.CALIBRATE:
            self._parameters_here = dict(model.named_parameters())
            self._show_model(model, self._parameters_here, dict(model.named_buffers()))
            self._instead = Calibrating(
                worker=self._worker,
                model=model,
                model_map=model_map,
                get_batch=get_batch,
                device=self._device,
                precision=self._precision,
                optimizer_on_device=not offload_optimizer,
                averaged=ema is not None,
                from_cache=from_cache,
                values=values,
            )
            return
        with global_generators_kept(self._device):
            self._parts = assemble(model, model_map, self._worker, self._device, self._precision, values)
        stage, everyone = self._parts.stage, self._parts.everyone
        self._expected_weight = ExpectedWeight(self._parts.replicas, self._device)
        self._seed = agreed_seed(self._seed, everyone)
        self._host = HostParameters(stage.parameters) if offload_optimizer else None
        if self._worker.topology.p > 1:
            allow_empty_stages(self._device if self._host is None else torch.device("cpu"))
        self._parameters_here = stage.parameters if self._host is None else self._host.parameters
        self._average = None if ema is None else WeightAverage(self._parameters_here, ema)
        if self._average is not None:
            self._registered.add(AVERAGE_STATE, self._average, per=Per.JOB)
        self._resting = RestingModules(stage, self._parameters_here)
        self._show_model(stage.module, self._resting.parameters, self._resting.buffers)
        if (description := hugging_face.Description.of(model)) is not None:
            self._registered.add(hugging_face.STATE, description, per=Per.JOB)
        self._hold_state = partial(
            held_state,
            stage=stage,
            parameters=self._parameters_here,
            state_dict=names,
            place=Place(rank=environment.rank, p=environment.p, d=environment.d),
        )
        self._held = self._hold_state(model_map)
        self._wrapped_map = model_map
        self._retracer = Retracer(model, examples, stages_of(self._worker, self._sections))
        self._changes = ScriptChanges(model, stage.module, stage.parameters, self._parameters_here, model_map, everyone)
        self._registered.add(_CHANGES, self._changes, per=Per.JOB)
        self.training = stage.module.training
        self._checkpointing = Checkpointing(self._worker, everyone)
        self._worker.phases.done("connect")

    # What nn.Module's users look at

    def _show_model(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
    ) -> None:
        self._show(
            Shown(
                module=module,
                parameters=parameters,
                buffers=buffers,
                device=self._device,
                seed=lambda: derived_seed(self._seed, f"apply after step {self._step}"),
            )
        )

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Around a pass: the stage computes with what the script has left in the model."""
        if self._host is not None:
            self._host.put_on_device()
        with self._resting.in_pass(), self._precision.whole_pass():
            yield

    def train(self, mode: bool = True) -> Self:
        """Sets training mode (or, with False, evaluation mode) in the user's model."""
        self.training = mode
        if self._instead is None:
            self._changes.pull_modes()
            self._parts.stage.module.train(mode)
            self._changes.push_modes()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises RuntimeError: a stage alone has no loss."""
        raise RuntimeError("a Varuna model is not called: use step(inputs) to train and evaluate(inputs) for a loss")

    # Training

    def set_optimizer(
        self,
        optimizer: Optimizers,
        loss_scale: float | Literal["dynamic"] = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Connects the optimizer, made from this object's `parameters()`: this object itself steps it.

        A call of `optimizer.step()` by the script does nothing from now on: `step` has done it. Where the script
        accumulates gradients, it is that call that makes the update. A log line names the trainable parameters that no
        optimizer holds.
        In a calibration generation this measures the profile and then ends the script (SystemExit with code 0), and
        under `varuna inspect` it writes the report.

        Args:
            optimizer: one, or a list of several, which step in its order; no parameter may be in two of them.
            loss_scale: for fp16 alone: a number, which then stays; or "dynamic": halved when gradients overflow,
                doubled after 2000 steps without.
            init_loss_scale, min_loss_scale: where a dynamic scale starts, and the least it becomes.

        Raises:
            ValueError: an optimizer holds a parameter that is not of this stage or is in another one, too, or cannot be
                split over stages and replicas; other optimizers were set before; or a scale is no positive number.
        """
        optimizers = listed(optimizer)
        if self._optimizers and set(map(id, self._optimizers)) != set(map(id, optimizers)):
            raise ValueError(
                "set_optimizer was called before, with other optimizers: give it all of them at once, in a list: "
                "set_optimizer([first, second])"
            )
        check_parameters(optimizers, self._parameters_here)
        environment = self._worker.environment
        if environment.mode is not Mode.INSPECT:  # which tells of it
            for each in optimizers:
                require_splittable(each, environment, self._sections)
            if self._worker.topology.replica == 0:
                report_left_out(optimizers, self._parameters_here)
        self._optimizers = optimizers
        for each in optimizers:
            take_over_steps(each, self._at_scripts_optimizer_step)
        if self._precision.needs_scale:
            self._scaler = LossScaler(loss_scale, init_loss_scale, min_loss_scale)
            self._registered.add(_LOSS_SCALE, self._scaler, per=Per.JOB, replace=True)
        if self._instead is not None:
            self._say_ready()
            self._instead.run(optimizers)

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        """Trains one step on this replica's share of the global batch. Called by all ranks.

        Args:
            inputs: the model's inputs, the same on all stages of a replica; `varuna.data.Batches` gives them.
            clip_grad_max_norm: bound on the L2 norm of the whole model's gradient.

        Returns:
            (mean loss over the global batch, overflow, L2 norm of the gradient before clipping), the same on every
            rank. The averaged gradients stay in `.grad` until the next step. Overflow: the loss or the gradient was not
            finite, so the optimizer has not stepped; the batch counts as used. A model that returns `(loss, weight)`
            has its mean over the sum of the weights of the global batch, however that is cut. Where the script
            accumulates, gradients and norm are those of all steps since its last update.

        Raises:
            FloatingPointError: too many steps in a row were not finite. Parameters are as before them.
            GenerationEnded, PeerLost: this worker must leave (both are SystemExit).
        """
        began_ns = time.perf_counter_ns()
        optimizers = self._require_optimizers("step")
        if self._broken:
            raise RuntimeError("an earlier step failed half-way, so ranks may no longer agree: end the script")
        if self._gradients_left.check():
            self._accumulation.drop()
        clip_factor(0.0, clip_grad_max_norm)  # refuses a bad bound before any work is done
        self._worker.departure.check()
        self._worker.calls.enter(Operation.STEP, self._step)
        self._accumulation.look_at_script(optimizers)
        self._save_when_agreed()
        self._say_ready()
        self._broken = True
        self._changes.begin_step()
        self._follow_changes()
        passed, totals = self._pass_and_agree(inputs)
        if totals.changed:
            self._changes.exchange()
            self._follow_changes()
            passed, totals = self._pass_and_agree(inputs)
        loss = totals.loss
        # Backwards were weighted for what was expected; the batch of this step may have been another.
        weight = self._accumulation.total_weight(totals.weight)
        correction = totals.expected_weight / weight / self.loss_scale if totals.weight else math.nan
        norm = math.sqrt(totals.squared_norm) * correction
        # Every gradient of the model is in this norm, which is the same on all ranks; so is what they conclude from it.
        overflow = self._non_finite.skips(self._step + 1, loss, norm, self._scaler)
        self._expected_weight.learn(totals.weight, totals.examples)
        self._settle(optimizers, totals, correction, norm, clip_grad_max_norm, skip=overflow)
        self._parts.keep_buffers_equal()
        self._gradients_left.note(self._parameters_here.values())
        self._step += 1
        self._samples.add_step(self._worker.environment.global_batch or totals.examples)
        self._broken = False
        self._checkpointing.automatic.agree(totals.wishes)
        step_ns = time.perf_counter_ns() - began_ns
        counted = overflow and self._non_finite.in_a_row > 0
        self._worker.report_step(self._step, loss, totals.examples, passed, step_ns, self._device, skipped=counted)
        self._scalars.step_done(self._step, loss, step_ns / 1e9, totals.examples, optimizers)
        return loss, overflow, norm

    def _save_when_agreed(self) -> None:
        """Between steps: makes the automatic checkpoint that all ranks have agreed on; gradients are in none."""
        automatic = self._checkpointing.automatic
        if self._accumulation.pending:
            return
        if automatic.will_save:
            self._changes.exchange()
        automatic.at_boundary(self._step, self._training_state, self._why_not_saved)

    def _pass_and_agree(self, inputs: Mapping[str, Any]) -> tuple[PassResult, Totals]:
        """Forward, backward and the ranks' agreement; `.grad` then has what was accumulated before in it, too.

        Where a rank has seen a change by the script (`Totals.changed`), everything is as it was before.
        """
        accumulation, stage = self._accumulation, self._parts.stage
        with buffers_kept_finite(list(stage.written.homes.values())), self._passing():
            accumulation.hold(stage.parameters.values())
            scale = self.loss_scale
            passed, global_batch = self._train_pass(inputs, scale)
            self._parts.reducer.reduce()
            self._parts.timeline.end()
            if accumulation.pending:
                accumulation.add_held(scale / self._expected(global_batch, 0.0, 0))
            totals = self._agree_on(passed)
            if totals.changed:
                stage.written.drop()
                accumulation.leave_out(stage.parameters.values())
            else:
                stage.written.settle()
        return passed, totals

    def _agree_on(self, passed: PassResult) -> Totals:
        says_expected = self._worker.topology.replica == 0
        return agree(
            self._parts.everyone,
            Totals(
                loss_sum=passed.loss_sum,
                examples=passed.examples,
                weight=passed.weight,
                expected_weight=passed.expected_weight if says_expected else 0.0,
                squared_norm=self._parts.reducer.squared_norm(),
                wishes=self._checkpointing.automatic.wishes(),
                changed=self._changes.are_pending,
            ),
        )

    def _follow_changes(self) -> None:
        """Has the stage run as the script has changed the model, once all ranks know of it."""
        if not self._changes.need_trace:
            return
        with global_generators_kept(self._device), self._precision.dry_run():
            model_map = self._changes.trace(self._retracer, self._wrapped_map)
        self._precision.check_parameters(self._parts.stage.parameters.items())
        with self._resting.refitted():
            self._parts.follow(model_map, self._host)
        self._held = self._hold_state(model_map)
        for optimizer in self._optimizers:
            self._changes.refuse_foreign(optimizer)

    def _expected(self, global_batch: int, weight: float, examples: int) -> float:
        """About what a global batch weighs; `weight` and `examples` are of the first micro-batch here."""
        if not self._parts.stage.weighted:
            return float(global_batch)
        return self._expected_weight.of(global_batch, weight, examples)

    def _settle(
        self,
        optimizers: Sequence[Optimizer],
        totals: Totals,
        correction: float,
        norm: float,
        max_norm: float | None,
        *,
        skip: bool,
    ) -> None:
        """Makes of the gradients what the step came to: an update, a part of a later one, or nothing (`skip`)."""
        accumulation, parameters = self._accumulation, self._parts.stage.parameters
        if accumulation.active and skip:
            accumulation.leave_out(parameters.values())
        elif accumulation.active:
            scale_gradients(parameters.values(), correction)
            accumulation.keep(totals.weight, norm, max_norm)
        elif skip:
            if self._host is not None:
                self._host.take_gradients()
        else:
            clip = clip_factor(norm, max_norm)
            self._update(optimizers, correction * clip, norm * clip)
            accumulation.note_update()
        if self._scaler is not None:
            self._scaler.update(overflow=not math.isfinite(totals.squared_norm))

    def _update(self, optimizers: Sequence[Optimizer], factor: float, norm: float) -> None:
        """Multiplies the gradients with `factor` and steps the optimizers.

        `norm`: of the whole model's gradient after that.
        """
        scale_gradients(self._parts.stage.parameters.values(), factor)
        if self._host is not None:
            self._host.take_gradients()
        if self._average is not None:
            self._average.add_trained()
        step_optimizers(optimizers, norm)
        if self._average is not None:
            self._average.update()

    def _at_scripts_optimizer_step(self) -> bool:
        """Makes the update of a script that accumulates; returns whether it is one."""
        accumulation = self._accumulation
        if not accumulation.active:
            accumulation.check_call()
        elif accumulation.pending and not self._gradients_left.check():
            clip = clip_factor(accumulation.norm, accumulation.clip_max_norm)
            self._update(self._require_optimizers("optimizer.step"), clip, accumulation.norm * clip)
            accumulation.drop()
            self._gradients_left.note(self._parameters_here.values())
        return accumulation.active

    def _why_not_saved(self) -> str | None:
        return non_finite_anywhere(self._parameters_here, self._parts.everyone)

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step will be multiplied with for its backward; 1 without fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def _train_pass(self, inputs: Mapping[str, Any], loss_scale: float) -> tuple[PassResult, int]:
        """Forward and backward; with it, the number of examples that the global batch is to have."""
        for parameter in self._parts.stage.parameters.values():
            parameter.grad = None
        environment = self._worker.environment
        examples = batch_size_of(inputs)
        sizes, first = share_of_batch(examples, environment, self._worker.topology.replica)
        expected = environment.global_batch or max(examples, 1)
        micro_batches = cut_inputs(inputs, sizes, first, first * environment.micro_batch)
        passed = self._parts.engine.train(
            micro_batches,
            expected_weight=partial(self._expected, expected),
            seed=self._seed,
            step=self._step + 1,
            loss_scale=loss_scale,
            before_last_backward=self._parts.reducer.start,
            settle=False,
        )
        return passed, expected

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None, *, ema: bool = False) -> float:
        """The mean loss over all replicas' `inputs`, in evaluation mode and without gradients. Called by all ranks.

        `inputs` may hold any number of examples on each replica; `batch_size`, their total, is checked when given.
        `ema`: with the moving average of the parameters in their place. Raises ValueError when none is kept.
        """
        if ema and self._average is None:
            raise ValueError("evaluate(ema=True), but no average is kept: give one to Varuna(..., ema=0.999)")
        self._worker.departure.check()
        self._worker.calls.enter(Operation.EVALUATE, self._step)
        sizes, first = share_of_batch(batch_size_of(inputs), self._worker.environment, self._worker.topology.replica)
        parameters = self._parts.stage.parameters
        averaged = self._average.exchanged_with(parameters) if ema and self._average is not None else nullcontext()
        with self._parts.evaluating(), self._passing(), averaged:
            passed = self._parts.engine.evaluate(
                cut_inputs(inputs, sizes, first), self._worker.link.micro_batch_evaluated
            )
        totals = agree(
            self._parts.everyone,
            Totals(loss_sum=passed.loss_sum, examples=passed.examples, weight=passed.weight),
        )
        if batch_size is not None and totals.examples != batch_size:
            raise ValueError(
                f"batch_size={batch_size}, but the replicas' inputs hold {totals.examples} examples together: "
                "give each replica its share"
            )
        return totals.loss

    # Checkpoints

    @property
    def checkpoint_url(self) -> str | None:
        """Where the job's own checkpoints go; None when it has no such store, as in a plain process."""
        return self._worker.environment.checkpoint_url or None

    def register_state(
        self, name: str, state: Stateful, per: Literal["auto", "section", "rank", "job"] = "auto"
    ) -> None:
        """Saves and loads `state` (an LR scheduler, say) with every checkpoint.

        Args:
            per: "auto": entries of its mappings whose keys are names of this stage's parameters go to whoever holds
                those in the next shape; the rest is kept once where all ranks have it equal, and else for each rank,
                which no other shape can load. "section": the same, but the save fails where that rest differs.
                "rank": each rank's own, for the same shape alone. "job": rank 0's, for all ranks.

        Raises ValueError for a name taken or an unknown `per`, and varuna.checkpoint.CheckpointError when a checkpoint
        that was loaded has the state of each rank of another shape.
        """
        if per not in list(Per):
            raise ValueError(f"per={per!r}: give 'auto', 'section', 'rank' or 'job'")
        self._registered.add(name, state, per=Per(per))

    def checkpoint(
        self,
        global_store: str | None = None,
        step: int | None = None,
        tmpdir: str | None = None,
        shard: bool = False,
        on_demand: bool = False,
        *,
        tempdir: str | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
    ) -> bool:
        """Writes the checkpoint `varuna_ckpt_<step>` into `global_store`, a path or URL. Called by all ranks.

        Without `global_store` it goes where the job's own checkpoints go (`checkpoint_url`), for `resume` to find.
        Returns when it is written there, or, with `tmpdir` (or `tempdir`) and without `on_demand`, as soon as the state
        is copied in memory. Workers that start on this VM again read what they find in `tmpdir` instead of the store;
        on the store's own disk no such copies are made. Writing is always shared out over the replicas (`shard`).

        It stays for good. With `keep=n`, only the newest n that were saved with `keep` stay in this store; those whose
        step is a multiple of `keep_every` stay all the same.

        Returns True when it is committed (with `tmpdir`: begun).
        Raises ValueError when there is no store, `tmpdir` is no local folder, or `keep` is not at least 1; and
        varuna.checkpoint.CheckpointError on all ranks when parameters are not finite, or any could not write. What
        fails in the background raises at the next call instead, which then writes nothing; without one the script ends
        with code 1.
        """
        asked = Asked(keep=keep, keep_every=keep_every)
        global_store = global_store or self.checkpoint_url
        if global_store is None:
            raise ValueError(
                "checkpoint() without a path: this process has no checkpoint store of its own; give one, or submit the "
                "script as a job"
            )
        self._worker.calls.enter(Operation.CHECKPOINT, self._step)
        if (reason := self._why_not_saved()) is not None:
            raise CheckpointError(f"checkpoint(): {reason}, and nothing could be resumed from it")
        if self._accumulation.pending:
            _log.warning("the checkpoint leaves out the gradients that no optimizer.step() has used yet")
        tmpdir = tempdir if tmpdir is None else tmpdir
        self._changes.exchange()
        self._checkpointing.save(
            str(global_store),
            self._step if step is None else step,
            self._training_state(),
            asked=asked,
            tmpdir=None if tmpdir is None else str(tmpdir),
            in_background=tmpdir is not None and not on_demand,
        )
        return True

    def load_checkpoint(self, global_store: str, iteration: int, check_complete: bool = True) -> None:
        """Loads `varuna_ckpt_<iteration>` from `global_store`. Called by all ranks, after `set_optimizer`.

        It is always checked that the checkpoint is complete. Raises varuna.checkpoint.CheckpointError when it is not,
        and ValueError when the ranks ask for different ones.
        """
        self._require_optimizers("load_checkpoint")
        self._worker.calls.enter(Operation.LOAD, self._step)
        self._resumed = True
        mean = agree(self._parts.everyone, Totals(loss_sum=float(iteration), examples=1, weight=1)).loss
        if mean != iteration:
            raise ValueError(
                f"load_checkpoint({iteration}): other ranks ask for another one (the mean of all is {mean:g}); "
                "give every rank the same"
            )
        self._take(self._checkpointing.load(str(global_store), iteration, self._training_state()))

    def resume(self, *, allow_fresh_start: bool = False) -> int:
        """Loads the newest complete checkpoint of the job; returns the number of steps it has behind it, 0 for none.

        Called by all ranks, after `set_optimizer`. Continue with step `resume() + 1`, made with
        `varuna.data.Batches(..., first_step=resume() + 1)`: with the next sample, also in another global batch.

        Args:
            allow_fresh_start: checkpoints of another model or optimizer are set aside, and training goes on from the
                newest one that fits, or from step 0.

        Raises varuna.checkpoint.CheckpointError: the newest complete checkpoint does not fit (MismatchError), the store
        cannot be read (StoreError), or the manager has recorded checkpoints and none can be read.
        """
        self._require_optimizers("resume")
        self._worker.calls.enter(Operation.RESUME, self._step)
        self._resumed = True
        self._worker.phases.done("script")
        loaded = self._checkpointing.resume(self._training_state(), allow_fresh_start=allow_fresh_start)
        if loaded is not None:
            self._take(loaded)
        self._worker.phases.done("load")
        self._say_ready()
        return self._step

    def _take(self, loaded: Loaded) -> None:
        """Goes on from what was loaded into the parameters and the optimizer."""
        self._accumulation.drop()
        self._step = loaded.step
        self._samples.load(loaded, self._worker.environment)
        self._seed = loaded.seed
        self._registered.load(loaded)
        if self._average is not None and not loaded.averaged:
            self._average.begin_again()
            _log.warning("the checkpoint has no average of the parameters: it begins with these", step=loaded.step)
        if self._average is None and loaded.averaged:
            _log.warning("the checkpoint's average of the parameters is left out: Varuna(ema=...) keeps it")

    def _training_state(self) -> TrainingState:
        return replace(
            self._held,
            optimizers=self._optimizers,
            schedulers=self._registered.schedulers(),
            averages={} if self._average is None else self._average.averages,
            user=self._registered.states(),
            user_per=self._registered.per,
            seed=self._seed,
            cursor=self._samples.cursor,
        )

    def _require_optimizers(self, caller: str) -> tuple[Optimizer, ...]:
        if not self._optimizers:
            raise RuntimeError(f"{caller}() needs the optimizer: call set_optimizer(optimizer) before")
        return self._optimizers

    def _say_ready(self) -> None:
        if not self._said_ready:
            self._said_ready = True
            environment = self._worker.environment
            if environment.checkpoint_url and environment.generation > 1 and not self._resumed:
                _log.warning("the script trains from its beginning again: call resume() after set_optimizer()")
            self._worker.phases.done("script")
            self._worker.link.ready(self._step, self._worker.phases.took_s)
