"""`Varuna`: the user's model, which all workers of a generation train together.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from varuna.assembly.connections import LinkKind
from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.checkpoint import CheckpointRequest, StateScope
from varuna.checkpoint.script_states import OWN_PREFIX, Stateful
from varuna.copies.ahead_taker import AheadTaker, take_as_newcomer
from varuna.data.batches import follow_shape
from varuna.devices.worker_device import choose_device, make_device_current
from varuna.diagnostics.tensorboard import TensorBoardWriter
from varuna.distributed.other_launchers import Stages
from varuna.distributed.worker_environment import read_worker_environment
from varuna.model.module_view import ModuleView
from varuna.optim.optimizers import Optimizers, list_optimizers
from varuna.optim.precision import LossScaler, TrainingPrecision
from varuna.partition.model_io.example_inputs import example_maker
from varuna.roles.calibration import CalibrationRole
from varuna.roles.inspection import InspectionRole
from varuna.roles.planned_shape import take_planned_place
from varuna.roles.role import VarunaRole
from varuna.roles.training import TrainingRole
from varuna.roles.training_parts import TrainingOptions
from varuna.roles.wrapped_model import Boundaries, ModelOptions, trace_model, wrap_model
from varuna.worker.newcomer import Newcomer
from varuna.worker.script_values import SCRIPT_VALUES
from varuna.worker.worker import WorkerProcess
from varuna_proto.environment import Mode

__all__ = ["Varuna"]


class Varuna(ModuleView):
    """Trains `model` as one stage of one replica of a P×D job, or alone in a plain process (P = D = 1).

    Wrap the model before you make the optimizer, because `parameters()` are those of this worker's stage. Arguments
    that the launcher knows may be left out; given ones must agree with the launcher.

    Args:
        model: returns its loss, the mean over the examples of its inputs; or `(loss, weight)`, if the loss is the mean
            over something else (tokens) and the weight is their number: see `step`. It is on the CPU or on `meta`. From
            `meta`, its modules initialise this stage's part, and no other part is ever in memory.
        stage_to_rank_map: ranks of each stage, joined by `,` and `;`.
        stages: P, in place of the map, for torchrun and similar launchers; ranks count replica by replica. "auto": the
            planner chooses P, D and the micro-batch for the processes that there are.
        get_batch_fn: `get_batch_fn(size, device="cpu")` gives example inputs, a dict for `model(**inputs)`; or one
            such dict, of any batch size.
        batch_size: B.
        chunk_size: examples in a micro-batch.
        fp16: mixed precision with fp16: parameters and optimizer stay fp32, and the loss is scaled (`set_optimizer`).
        local_rank, device: index of the CUDA device; -1: the launcher's.
        shared_weights: pairs of parameter names that train as one. Parameters that share memory are found without it.
        from_cache: False measures the model when the job first starts, even if the manager has its profile; with
            `stages="auto"` at each start.
        dtype: the type of the forward's matrix products; `torch.bfloat16` is mixed precision without a loss scale.
        offload_optimizer: keep the optimizer and its state in host memory; `parameters()` are then copies there.
        cut_points: the number of cut-points to find in a model that has no CutPoint; None: between its repeated blocks;
            0: no cut-points.
        weights: path or URL of pretrained weights: a folder written by `save_pretrained`, or one `.safetensors` file.
            Each stage reads its own part.
        ema: keep an exponential moving average of the parameters with this decay (0.999, say), updated after each step
            of the optimizer. `evaluate(..., ema=True)` and `varuna export --ema` use it.
        max_non_finite_steps: the number of steps in a row that may be skipped because their loss or gradient is not
            finite; None: 10. One more raises FloatingPointError. A job file's `on_nonfinite: stop` or `go_on` takes
            precedence, and the log says so.
        accumulate: the script's own `optimizer.step()` makes the updates, each from the mean over all `step`s since the
            last update. A loop of the usual form, `if (i + 1) % n == 0: optimizer.step()`, is found without it.
        random_by_example: random draws of forward (dropout) belong to examples, so they are the same for every
            micro-batch size. False: they belong to micro-batches, and the job keeps its first micro-batch size.
        boundaries: "bf16" with `dtype=torch.bfloat16`: fp32 tensors of a batch, and their gradients, cross from stage
            to stage in bf16, in half the bytes; None: in the types that the model gives them.
        links: "nccl": stages on GPUs of one machine exchange tensors over NCCL, from device to device;
            "nccl-everywhere": those on different machines, too. Each rank needs a CUDA device of its own. "gloo":
            through host memory.

    The global random generators keep their state on every rank.

    Raises:
        ValueError: an argument is missing, contradicts the launcher, or does not fit the model; or this rank has
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
        stages: Stages | None = None,
        ema: float | None = None,
        max_non_finite_steps: int | None = None,
        accumulate: bool = False,
        random_by_example: bool = True,
        boundaries: Boundaries | None = None,
        links: LinkKind = "gloo",
    ) -> None:
        super().__init__()
        options = TrainingOptions(
            offload_optimizer=offload_optimizer,
            ema=ema,
            max_non_finite_steps=max_non_finite_steps,
            accumulate=accumulate,
            links=links,
        )
        get_batch = example_maker(get_batch_fn)
        environment = read_worker_environment(
            stage_to_rank_map=stage_to_rank_map, stages=stages, batch_size=batch_size, chunk_size=chunk_size
        )
        model_options = ModelOptions(
            shared_weights=shared_weights or (),
            cut_points=cut_points,
            random_by_example=random_by_example,
            boundaries=boundaries,
            weights=weights,
        )
        newcomer, traced, taken_ahead = Newcomer.from_environment(environment), None, AheadTaker()
        if newcomer is not None:
            # The trace needs neither a rank nor the device, which the present generation uses.
            expected_device = torch.device(torch.device(environment.device).type)
            precision = TrainingPrecision.from_arguments(fp16, dtype, expected_device)
            traced = trace_model(
                torch.device("cpu"), precision, model=model, get_batch=get_batch, options=model_options
            )
            take_as_newcomer(taken_ahead, newcomer.link, environment)
            newcomer.wait_for_rank()
            environment = read_worker_environment(
                stage_to_rank_map=stage_to_rank_map, stages=stages, batch_size=batch_size, chunk_size=chunk_size
            )
            follow_shape(environment)
        scalars = TensorBoardWriter(environment, os.environ)
        self._worker = WorkerProcess.join_generation(environment, None if newcomer is None else newcomer.link)
        inspects = environment.mode is Mode.INSPECT
        own_device = make_device_current(choose_device(environment, None if inspects else device, local_rank))
        self._precision = TrainingPrecision.from_arguments(fp16, dtype, own_device)
        self._precision.check_parameters(model.named_parameters())
        wrapped = wrap_model(
            self._worker,
            own_device,
            self._precision,
            model=model,
            get_batch=get_batch,
            options=model_options,
            traced=traced,
        )
        if environment.shape_is_open:
            setup = OptimizerSetup(on_device=not offload_optimizer, averaged=ema is not None)
            take_planned_place(wrapped, setup, from_cache=from_cache)
        seed = torch.initial_seed()
        self._role: VarunaRole
        SCRIPT_VALUES.send_to()
        if inspects:
            self._role = InspectionRole(wrapped, seed)
        elif environment.mode is Mode.CALIBRATE:
            self._role = CalibrationRole(
                wrapped,
                seed,
                optimizer_on_device=not offload_optimizer,
                averaged=ema is not None,
                from_cache=from_cache,
            )
        else:
            self._role = TrainingRole(
                wrapped, seed, options, scalars=scalars, follow_surface=self._set_surface, taken_ahead=taken_ahead
            )
            self.training = self._role.surface.module.training
            SCRIPT_VALUES.send_to(self._worker.link.report_values, scalars.write_values)
        self._set_surface(self._role.surface)

    def train(self, mode: bool = True) -> Self:
        """Sets training mode (or, with False, evaluation mode) in the user's model."""
        self.training = mode
        self._role.set_mode(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises RuntimeError, because a stage alone has no loss."""
        raise RuntimeError("a Varuna model is not called: use step(inputs) to train and evaluate(inputs) for a loss")

    # Training

    def set_optimizer(
        self,
        optimizer: Optimizers,
        loss_scale: float | Literal["dynamic"] = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Connects the optimizer, which is made from this object's `parameters()`. `step` steps it.

        From now on `optimizer.step()` in the script does nothing, because `step` has made the update. If the script
        accumulates gradients, `optimizer.step()` makes the update. A log line names the trainable parameters that no
        optimizer holds.
        In a calibration generation this method measures the profile, and under `varuna inspect` it writes the report;
        both then end the script (SystemExit with code 0).

        Args:
            optimizer: one optimizer, or a list of several, which step in its order. Each parameter is in one at most.
            loss_scale: for fp16 only: a fixed number, or "dynamic", which is halved when gradients overflow and doubled
                after 2000 steps without overflow.
            init_loss_scale, min_loss_scale: the first and the least value of a dynamic scale.

        Raises:
            ValueError: an optimizer holds a parameter of another stage or of another optimizer, or cannot be split over
                stages and replicas; other optimizers were set before; or a scale is not a positive number.
        """
        optimizers = list_optimizers(optimizer)
        scaler = LossScaler(loss_scale, init_loss_scale, min_loss_scale) if self._precision.needs_scale else None
        self._role.set_optimizers(optimizers, scaler)

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        """Trains one step on this replica's share of the global batch. Called by all ranks.

        Args:
            inputs: the model's inputs, the same on all stages of a replica; `varuna.data.Batches` gives them.
            clip_grad_max_norm: bound on the L2 norm of the whole model's gradient.

        Returns:
            (mean loss over the global batch, overflow, L2 norm of the gradient before clipping), the same on every
            rank. The averaged gradients stay in `.grad` until the next step. Overflow: the loss or the gradient was not
            finite, so the optimizer has not stepped; the batch counts as used. If the model returns `(loss, weight)`,
            the mean is over the sum of the weights of the global batch. If the script accumulates, gradients and norm
            are those of all steps since its last update.

        Raises:
            FloatingPointError: too many steps in a row were not finite, or this one was and the job file has
                `on_nonfinite: stop`. They have not changed the parameters.
            GenerationEnded, PeerLost: this worker must leave (both are SystemExit).
        """
        return self._role.train_step(inputs, clip_grad_max_norm)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss for the next step's backward; 1 without fp16."""
        return self._role.loss_scale

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None, *, ema: bool = False) -> float:
        """Computes the mean loss over all replicas' `inputs`, in evaluation mode and without gradients.

        Called by all ranks. `inputs` may hold any number of examples on each replica; `batch_size`, if given, must be
        their total. `ema`: use the moving average of the parameters. Raises ValueError when there is none.
        """
        return self._role.evaluate(inputs, batch_size, ema=ema)

    def full_state_dict(self) -> dict[str, Any]:
        """The state of the whole model, with the names and shapes of the plain model's `state_dict()`.

        Called by all ranks. Rank 0 gets parameters and persistent buffers from all stages, in its host memory, as they
        are after the last step; every other rank gets an empty dict. `torch.save` it, or load it into the plain model.
        For a model that is too large for one host's memory take `varuna export`.
        """
        return self._role.gather_state()

    # Checkpoints

    @property
    def checkpoint_url(self) -> str | None:
        """The store of the job's own checkpoints; None without such a store, as in a plain process."""
        return self._worker.environment.checkpoint_url or None

    def register_state(
        self, name: str, state: Stateful, per: Literal["auto", "section", "rank", "job"] = "auto"
    ) -> None:
        """Saves and loads `state` (an LR scheduler, say) with every checkpoint.

        Args:
            per: "auto": entries of its mappings whose keys are names of this stage's parameters go to the ranks that
                hold these parameters in the next shape. The rest is saved once if it is equal on all ranks, and
                otherwise for each rank, which no other shape can load. "section": the same, but the save fails if the
                rest differs. "rank": each rank's own, for the same shape only. "job": rank 0's, for all ranks.

        Raises ValueError for a duplicate name, one that begins with "varuna." or an unknown `per`, and
        varuna.checkpoint.CheckpointError when the loaded checkpoint has a state of this name for each rank of another
        shape.
        """
        if name.startswith(OWN_PREFIX):
            raise ValueError(f"a state named {name!r}: names that begin with {OWN_PREFIX!r} are Varuna's own")
        if per not in list(StateScope):
            raise ValueError(f"per={per!r}: give 'auto', 'section', 'rank' or 'job'")
        self._role.register_state(name, state, StateScope(per))

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

        Without `global_store` it goes to the job's own store (`checkpoint_url`), where `resume` finds it.
        Returns when the checkpoint is written; with `tmpdir` (or `tempdir`) and without `on_demand`, as soon as the
        state is copied in memory. Workers that later start on this VM read the copy in `tmpdir` instead of the store;
        on the store's own disk there are no such copies. All replicas share the writing (`shard` has no effect).

        The checkpoint stays until you delete it. With `keep=n`, only the newest n checkpoints that were saved with
        `keep` stay in this store, and those whose step is a multiple of `keep_every`.

        Returns True when the checkpoint is committed (with `tmpdir`: begun).
        Raises ValueError when there is no store, `tmpdir` is not a local folder, or `keep` is less than 1; and
        varuna.checkpoint.CheckpointError on all ranks when parameters are not finite, or a rank could not write. A
        failure in the background raises at the next call, which then writes nothing. Without a next call the script
        ends with code 1.
        """
        request = CheckpointRequest(keep=keep, keep_every=keep_every)
        global_store = global_store or self.checkpoint_url
        if global_store is None:
            raise ValueError(
                "checkpoint() without a path: this process has no checkpoint store of its own; give one, or submit the "
                "script as a job"
            )
        tmpdir = tempdir if tmpdir is None else tmpdir
        self._role.save_checkpoint(
            str(global_store),
            step,
            request=request,
            tmpdir=None if tmpdir is None else str(tmpdir),
            in_background=tmpdir is not None and not on_demand,
        )
        return True

    def load_checkpoint(self, global_store: str, iteration: int, check_complete: bool = True) -> None:
        """Loads `varuna_ckpt_<iteration>` from `global_store`. Called by all ranks, after `set_optimizer`.

        If training goes on from it, the job's own checkpoints of later steps are given up with the next step.
        The checkpoint must be complete, with any `check_complete`. Raises varuna.checkpoint.CheckpointError when it is
        not, and ValueError when ranks give different iterations.
        """
        self._role.load_checkpoint(str(global_store), iteration)

    def resume(self, *, allow_fresh_start: bool = False) -> int:
        """Loads the newest complete checkpoint of the job; returns its step, or 0 without a checkpoint.

        Called by all ranks, after `set_optimizer`. Continue with step `resume() + 1`, from
        `varuna.data.Batches(..., first_step=resume() + 1)`, which begins with the next sample even if the global batch
        has changed.

        Args:
            allow_fresh_start: set checkpoints of another model or optimizer aside, and continue from the newest one
                that fits, or from step 0.

        Raises varuna.checkpoint.CheckpointError when the newest complete checkpoint does not fit (MismatchError), the
        store cannot be read (StoreError), or the manager has recorded checkpoints but none can be read.
        """
        return self._role.resume(allow_fresh_start=allow_fresh_start)
