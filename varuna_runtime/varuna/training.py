"""`Varuna`: the user's model, trained by all workers of the generation together.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self

import structlog
import torch
from torch import nn
from torch.optim import Optimizer

from varuna.agreement import Totals, agree
from varuna.assembly import agreed_seed, assemble, stages_of
from varuna.calibrating import Calibrating
from varuna.checkpoint import Loaded, TrainingState, hugging_face
from varuna.checkpointing import Checkpointing, Registered, Stateful, held_state, state_dict_names
from varuna.example_inputs import example_maker
from varuna.generators import global_generators_kept
from varuna.inspecting import Inspecting, report_refusal
from varuna.launch import worker_environment
from varuna.offload import HostParameters
from varuna.optim import clip_factor, scale_gradients
from varuna.optimizer_check import require_splittable
from varuna.partition import PartitionError, trace
from varuna.partition.batch import batch_size_of
from varuna.partition.retrace import Retracer
from varuna.pipeline.engine import PassResult, cut_inputs
from varuna.precision import LossScaler, Precision
from varuna.pretrained import Weights
from varuna.scalars import Scalars
from varuna.script_changes import ScriptChanges
from varuna.stepping import GradientsLeft, refuse_clipping, step_optimizer, take_over_steps
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


class Varuna(nn.Module):
    """Trains `model` as one stage of one replica of a P×D job; in a plain process, alone (P = D = 1).

    Wrap the model before making the optimizer: `parameters()` are those of this worker's stage. What the launcher
    knows may be left out; what is given must agree with it.

    Args:
        model: returns its loss, the mean over the examples of its inputs. On the CPU, or on `meta`: then its modules
            initialise what is this stage's, and nothing else of it is ever in memory.
        stage_to_rank_map: ranks of each stage, joined by `,` and `;`.
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

    The global random generators are afterwards as they were before, on every rank.

    Raises:
        ValueError: an argument is missing, contradicts the launcher, or does not fit the model.
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
    ) -> None:
        super().__init__()
        get_batch = example_maker(get_batch_fn)
        environment = worker_environment(
            stage_to_rank_map=stage_to_rank_map, batch_size=batch_size, chunk_size=chunk_size
        )
        self._scalars = Scalars(environment, os.environ)
        self._worker = Worker.join(environment)
        inspected = environment.mode is Mode.INSPECT
        self._device = make_current(choose_device(environment, None if inspected else device, local_rank))
        self._precision = Precision.of(fp16, dtype, self._device)
        self._precision.check_parameters(model.named_parameters())
        try:
            with global_generators_kept(self._device), self._precision.dry_run():
                example_inputs = get_batch(_TRACE_EXAMPLES)
                model_map = trace(model, example_inputs, shared_weights=shared_weights or (), cut_points=cut_points)
        except PartitionError as error:
            if inspected:
                report_refusal(environment, error)
            raise
        self._worker.phases.done("trace")
        self._sections = len(model_map.sections)
        self._optimizer: Optimizer | None = None
        self._scaler: LossScaler | None = None
        self._step = 0
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
            self._instead = Inspecting(environment, model, model_map, get_batch, self._device, self._precision)
            return
        if environment.mode is Mode.CALIBRATE:
            self._parameters_here = dict(model.named_parameters())
            self._instead = Calibrating(
                worker=self._worker,
                model=model,
                model_map=model_map,
                get_batch=get_batch,
                device=self._device,
                precision=self._precision,
                optimizer_on_device=not offload_optimizer,
                from_cache=from_cache,
                values=values,
            )
            return
        with global_generators_kept(self._device):
            self._parts = assemble(model, model_map, self._worker, self._device, self._precision, values)
        stage, everyone = self._parts.stage, self._parts.everyone
        self._seed = agreed_seed(self._seed, everyone)
        self._host = HostParameters(stage.parameters) if offload_optimizer else None
        self._parameters_here = stage.parameters if self._host is None else self._host.parameters
        if (description := hugging_face.Description.of(model)) is not None:
            self._registered.add(hugging_face.STATE, description)
        self._hold_state = partial(held_state, stage=stage, parameters=self._parameters_here, state_dict=names)
        self._held = self._hold_state(model_map)
        self._wrapped_map = model_map
        self._retracer = Retracer(model, example_inputs, stages_of(self._worker, self._sections))
        self._changes = ScriptChanges(model, stage.module, stage.parameters, self._parameters_here, model_map, everyone)
        self._registered.add(_CHANGES, self._changes)
        self.training = stage.module.training
        self._checkpointing = Checkpointing(self._worker, everyone)
        self._worker.phases.done("connect")

    # What nn.Module's users look at

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters, by their names in the user's model. Not for `clip_grad_norm_` (RuntimeError)."""
        refuse_clipping()
        for name, parameter in self._parameters_here.items():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This stage's parameters by their names in the user's model. To save the whole, call `checkpoint`."""
        return {name: parameter.detach() for name, parameter in self._parameters_here.items()}

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
        optimizer: Optimizer,
        loss_scale: float | Literal["dynamic"] = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Connects the optimizer, made from this object's `parameters()`: this object itself steps it.

        A call of `optimizer.step()` by the script does nothing from now on: `step` has done it.
        In a calibration generation this measures the profile and then ends the script (SystemExit with code 0), and
        under `varuna inspect` it writes the report.

        Args:
            loss_scale: for fp16 alone: a number, which then stays; or "dynamic": halved when gradients overflow,
                doubled after 2000 steps without.
            init_loss_scale, min_loss_scale: where a dynamic scale starts, and the least it becomes.

        Raises:
            ValueError: the optimizer holds a parameter that is not of this stage, or cannot be split over stages and
                replicas; or a scale is no positive number.
        """
        own = {id(parameter) for parameter in self._parameters_here.values()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise ValueError(
                        f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not of this stage: "
                        "make the optimizer after wrapping the model, from the Varuna object's parameters()"
                    )
        if self._worker.environment.mode is not Mode.INSPECT:  # which tells of it
            require_splittable(optimizer, self._worker.environment, self._sections)
        self._optimizer = optimizer
        take_over_steps(optimizer)
        if self._precision.needs_scale:
            self._scaler = LossScaler(loss_scale, init_loss_scale, min_loss_scale)
            self._registered.add(_LOSS_SCALE, self._scaler, replace=True)
        if self._instead is not None:
            self._say_ready()
            self._instead.run(optimizer)

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        """Trains one step on this replica's share of the global batch. Called by all ranks.

        Args:
            inputs: the model's inputs, the same on all stages of a replica; `varuna.data.Batches` gives them.
            clip_grad_max_norm: bound on the L2 norm of the whole model's gradient.

        Returns:
            (mean loss over the global batch, overflow, L2 norm of the gradient before clipping), the same on every
            rank. The averaged gradients stay in `.grad` until the next step. Overflow, with fp16 only: a gradient was
            not finite, so the optimizer has not stepped; the batch counts as used, and the norm is not finite either.

        Raises:
            GenerationEnded, PeerLost: this worker must leave (both are SystemExit).
        """
        began_ns = time.perf_counter_ns()
        optimizer = self._require_optimizer("step")
        if self._broken:
            raise RuntimeError("an earlier step failed half-way, so ranks may no longer agree: end the script")
        self._gradients_left.check()
        clip_factor(0.0, clip_grad_max_norm)  # refuses a bad bound before any work is done
        self._worker.departure.check()
        if self._checkpointing.automatic.will_save:
            self._changes.exchange()
        self._checkpointing.automatic.at_boundary(self._step, self._training_state)
        self._say_ready()
        self._broken = True
        scale = self.loss_scale
        self._changes.begin_step()
        self._follow_changes()
        passed, expected, totals = self._pass_and_agree(inputs, scale)
        if totals.changed:
            self._parts.stage.written.drop()
            self._changes.exchange()
            self._follow_changes()
            passed, expected, totals = self._pass_and_agree(inputs, scale)
        self._parts.stage.written.settle()
        loss = totals.loss
        # Backwards were weighted for the agreed batch; the batch of this step may have been another.
        correction = expected / totals.examples / scale
        norm = math.sqrt(totals.squared_norm) * correction
        # Every gradient of the model is in this norm, which is the same on all ranks; so is what they conclude from it.
        overflow = self._scaler is not None and not math.isfinite(totals.squared_norm)
        clip = clip_factor(norm, clip_grad_max_norm)
        self._update(optimizer, correction * clip, norm * clip, skip=overflow)
        self._gradients_left.note(self._parameters_here.values())
        self._step += 1
        self._broken = False
        self._checkpointing.automatic.agree(totals.wishes)
        step_ns = time.perf_counter_ns() - began_ns
        self._worker.report_step(self._step, loss, totals.examples, passed, step_ns, self._device)
        self._scalars.step_done(self._step, loss, step_ns / 1e9, totals.examples, optimizer)
        return loss, overflow, norm

    def _pass_and_agree(self, inputs: Mapping[str, Any], scale: float) -> tuple[PassResult, int, Totals]:
        """One pass with its sums over the ranks. The buffers that forward writes are not settled yet."""
        passed, expected = self._train_pass(inputs, scale)
        self._parts.reducer.reduce()
        self._parts.timeline.end()
        totals = agree(
            self._parts.everyone,
            Totals(
                loss_sum=passed.loss_sum,
                examples=passed.examples,
                squared_norm=self._parts.reducer.squared_norm(),
                wishes=self._checkpointing.automatic.wishes(),
                changed=self._changes.are_pending,
            ),
        )
        return passed, expected, totals

    def _follow_changes(self) -> None:
        """Has the stage run as the script has changed the model, once all ranks know of it."""
        if not self._changes.need_trace:
            return
        with global_generators_kept(self._device), self._precision.dry_run():
            model_map = self._changes.trace(self._retracer, self._wrapped_map)
        self._precision.check_parameters(self._parts.stage.parameters.items())
        self._parts.follow(model_map, self._host)
        self._held = self._hold_state(model_map)
        if self._optimizer is not None:
            self._changes.refuse_foreign(self._optimizer)

    def _update(self, optimizer: Optimizer, factor: float, norm: float, *, skip: bool) -> None:
        """Multiplies the gradients with `factor` and steps the optimizer, unless they have overflowed (`skip`).

        `norm`: of the whole model's gradient after that.
        """
        if not skip:
            scale_gradients(self._parts.stage.parameters.values(), factor)
        if self._host is not None:
            self._host.take_gradients()
        if not skip:
            step_optimizer(optimizer, norm)
            if self._host is not None:
                self._host.put_back()
        if self._scaler is not None:
            self._scaler.update(overflow=skip)
        self._parts.keep_buffers_equal()

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step will be multiplied with for its backward; 1 without fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def _train_pass(self, inputs: Mapping[str, Any], loss_scale: float) -> tuple[PassResult, int]:
        """Forward and backward; with it, the number of examples for which the gradients were weighted."""
        for parameter in self._parts.stage.parameters.values():
            parameter.grad = None
        environment = self._worker.environment
        examples = batch_size_of(inputs)
        sizes, first = share_of_batch(examples, environment, self._worker.topology.replica)
        expected = environment.global_batch or max(examples, 1)
        micro_batches = cut_inputs(inputs, sizes, first)
        with self._precision.whole_pass():
            passed = self._parts.engine.train(
                micro_batches,
                global_batch=expected,
                seed=self._seed,
                step=self._step + 1,
                loss_scale=loss_scale,
                before_last_backward=self._parts.reducer.start,
                settle=False,
            )
        return passed, expected

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None) -> float:
        """The mean loss over all replicas' `inputs`, in evaluation mode and without gradients. Called by all ranks.

        `inputs` may hold any number of examples on each replica; `batch_size`, their total, is checked when given.
        """
        self._worker.departure.check()
        sizes, first = share_of_batch(batch_size_of(inputs), self._worker.environment, self._worker.topology.replica)
        with self._parts.evaluating(), self._precision.whole_pass():
            passed = self._parts.engine.evaluate(
                cut_inputs(inputs, sizes, first), self._worker.link.micro_batch_evaluated
            )
        totals = agree(self._parts.everyone, Totals(loss_sum=passed.loss_sum, examples=passed.examples))
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

    def register_state(self, name: str, state: Stateful) -> None:
        """Saves and loads `state` (an LR scheduler, say) with every checkpoint. Raises ValueError for a name taken."""
        self._registered.add(name, state)

    def checkpoint(
        self,
        global_store: str | None = None,
        step: int | None = None,
        tmpdir: str | None = None,
        shard: bool = False,
        on_demand: bool = False,
        *,
        tempdir: str | None = None,
    ) -> bool:
        """Writes the checkpoint `varuna_ckpt_<step>` into `global_store`, a path or URL. Called by all ranks.

        Without `global_store` it goes where the job's own checkpoints go (`checkpoint_url`), for `resume` to find.
        Returns when it is written there, or, with `tmpdir` (or `tempdir`) and without `on_demand`, as soon as the state
        is copied in memory. Workers that start on this VM again read what they find in `tmpdir` instead of the store;
        on the store's own disk no such copies are made. Writing is always shared out over the replicas (`shard`).

        Returns whether it is committed (with `tmpdir`: begun). A failed save is logged and does not stop training.
        Raises ValueError when there is no store, or `tmpdir` is no local folder.
        """
        global_store = global_store or self.checkpoint_url
        if global_store is None:
            raise ValueError(
                "checkpoint() without a path: this process has no checkpoint store of its own; give one, or submit the "
                "script as a job"
            )
        tmpdir = tempdir if tmpdir is None else tmpdir
        self._changes.exchange()
        return self._checkpointing.save(
            str(global_store),
            self._step if step is None else step,
            self._training_state(),
            tmpdir=None if tmpdir is None else str(tmpdir),
            in_background=tmpdir is not None and not on_demand,
        )

    def load_checkpoint(self, global_store: str, iteration: int, check_complete: bool = True) -> None:
        """Loads `varuna_ckpt_<iteration>` from `global_store`. Called by all ranks, after `set_optimizer`.

        It is always checked that the checkpoint is complete. Raises varuna.checkpoint.CheckpointError when it is not,
        and ValueError when the ranks ask for different ones.
        """
        self._require_optimizer("load_checkpoint")
        self._resumed = True
        mean = agree(self._parts.everyone, Totals(loss_sum=float(iteration), examples=1)).loss
        if mean != iteration:
            raise ValueError(
                f"load_checkpoint({iteration}): other ranks ask for another one (the mean of all is {mean:g}); "
                "give every rank the same"
            )
        self._take(self._checkpointing.load(str(global_store), iteration, self._training_state()))

    def resume(self) -> int:
        """Loads the newest complete checkpoint of the job; returns the number of steps it has behind it, 0 for none.

        Called by all ranks, after `set_optimizer`. Continue with step `resume() + 1`.
        Raises varuna.checkpoint.CheckpointError when the manager has recorded checkpoints and none can be read.
        """
        self._require_optimizer("resume")
        self._resumed = True
        self._worker.phases.done("script")
        loaded = self._checkpointing.resume(self._training_state())
        if loaded is not None:
            self._take(loaded)
        self._worker.phases.done("load")
        self._say_ready()
        return self._step

    def _take(self, loaded: Loaded) -> None:
        """Goes on from what was loaded into the parameters and the optimizer."""
        if self._host is not None:
            self._host.put_back()
        self._step = loaded.step
        self._seed = loaded.seed
        self._registered.load(loaded)

    def _training_state(self) -> TrainingState:
        return replace(self._held, optimizer=self._optimizer, user=self._registered.states(), seed=self._seed)

    def _require_optimizer(self, caller: str) -> Optimizer:
        if self._optimizer is None:
            raise RuntimeError(f"{caller}() needs the optimizer: call set_optimizer(optimizer) before")
        return self._optimizer

    def _say_ready(self) -> None:
        if not self._said_ready:
            self._said_ready = True
            environment = self._worker.environment
            if environment.checkpoint_url and environment.generation > 1 and not self._resumed:
                _log.warning("the script trains from its beginning again: call resume() after set_optimizer()")
            self._worker.phases.done("script")
            self._worker.link.ready(self._step, self._worker.phases.took_s)
