"""`Varuna`: the user's model, trained by all workers of the generation together.

Letters: P stages, D replicas, B examples in the global batch.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NoReturn, Protocol, Self

import psutil
import structlog
import torch
from torch import nn
from torch.optim import Optimizer

from varuna._gloo import first_line
from varuna.agreement import Totals, agree
from varuna.checkpoint import Checkpointer, Loaded, TrainingState, load, resume, state_dict_names
from varuna.departure import Departure, PeerLost
from varuna.generators import global_generators_kept
from varuna.launch import worker_environment
from varuna.offload import HostParameters
from varuna.optim import GradientReducer, clip_factor, copy_from_first, scale_gradients
from varuna.partition import Stage, build_stage, trace
from varuna.partition.batch import batch_size_of
from varuna.partition.model_map import first_names
from varuna.pipeline.engine import Engine, PassResult, Position, cut_inputs
from varuna.pipeline.timeline import Timeline
from varuna.precision import LossScaler, Precision
from varuna.profiler import calibrate
from varuna.saves import AutomaticSaves, wait_for_save
from varuna.topology import connect_links, connect_tied, share_of_batch, stage_sections, tied_over_stages
from varuna.worker import Worker, choose_device
from varuna_planner.schedule import Policy
from varuna_proto.environment import Mode
from varuna_proto.v1 import worker_pb2

__all__ = ["Varuna"]

_log = structlog.get_logger("varuna")

_TRACE_EXAMPLES = 2
"""Examples in the batch that the dry run is shown."""

_LOSS_SCALE = "varuna.loss_scale"
"""The name under which checkpoints keep the state of the loss scale."""

_LOAD_LIMIT = timedelta(minutes=30)
"""How long ranks wait for each other while they load a checkpoint."""

_LOOK_UP_S = 0.1
"""How often the wait at the script's end looks whether the worker must leave."""


class Stateful(Protocol):
    """What `register_state` takes: a scheduler, a sampler, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Varuna(nn.Module):
    """Trains `model` as one stage of one replica of a P×D job; in a plain process, alone (P = D = 1).

    Wrap the model before making the optimizer: `parameters()` are those of this worker's stage. What the launcher
    knows may be left out; what is given must agree with it.

    Args:
        model: returns its loss, the mean over the examples of its inputs. On CPU or on `meta`.
        stage_to_rank_map: ranks of each stage, joined by `,` and `;`.
        get_batch_fn: `get_batch_fn(size, device="cpu")` gives example inputs, a dict for `model(**inputs)`.
        batch_size: B.
        chunk_size: examples in a micro-batch.
        fp16: mixed precision with fp16: parameters and optimizer stay fp32, and the loss is scaled (`set_optimizer`).
        local_rank, device: index of the CUDA device; -1: the launcher's.
        shared_weights: pairs of parameter names that train as one. Parameters that share memory are found without it.
        from_cache: accepted for the seeds' sake; the dry run takes no time worth a cache.
        dtype: what the forward's matrix products run in; `torch.bfloat16` is mixed precision without a loss scale.
        offload_optimizer: keep the optimizer and its state in host memory: `parameters()` are then copies there.

    The global random generators are afterwards as they were before, on every rank.

    Raises:
        ValueError: an argument is missing, contradicts the launcher, or does not fit the model.
        varuna.partition.PartitionError: the model cannot be cut as it stands.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str | None = None,
        get_batch_fn: Callable[..., Mapping[str, Any]] | None = None,
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
    ) -> None:
        super().__init__()
        if get_batch_fn is None:
            raise ValueError(
                "get_batch_fn is missing: Varuna finds where to cut the model by running it on example inputs; "
                "pass a function (size, device='cpu') -> dict of model inputs"
            )
        environment = worker_environment(
            stage_to_rank_map=stage_to_rank_map, batch_size=batch_size, chunk_size=chunk_size
        )
        self._worker = Worker.join(environment)
        self._device = choose_device(environment, device, local_rank)
        self._precision = Precision.of(fp16, dtype, self._device)
        self._precision.check_parameters(model.named_parameters())
        self._get_batch: Callable[[int], dict[str, Any]] = lambda size: dict(get_batch_fn(size, device="cpu"))
        with global_generators_kept(self._device), self._precision.dry_run():
            self._model_map = trace(model, self._get_batch(_TRACE_EXAMPLES), shared_weights=shared_weights or ())
        buffer_names, _ = first_names(model.named_buffers(remove_duplicate=False))
        self._state_dict_names = state_dict_names(model, {**self._model_map.first_name, **buffer_names})
        self._optimizer: Optimizer | None = None
        self._scaler: LossScaler | None = None
        self._offload_optimizer = offload_optimizer
        self._step = 0
        self._seed = torch.initial_seed()
        self._registered: dict[str, Stateful] = {}
        self._unclaimed: dict[str, dict[str, Any]] = {}
        self._said_ready = False
        self._resumed = False
        self._broken = False
        self._checkpointers: dict[str, Checkpointer] = {}
        self._saves = AutomaticSaves(self._own_checkpointer(), self._worker.departure, decides=environment.rank == 0)
        atexit.register(_finish_saves, self._checkpointers, self._worker.departure)
        if environment.mode is Mode.CALIBRATE:
            self._calibrated_model = [model]  # in a list, so that it is no submodule
            self._parameters_here: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        else:
            with global_generators_kept(self._device):
                self._build(model)
            self._host = HostParameters(self._stage.parameters) if offload_optimizer else None
            self._parameters_here = self._stage.parameters if self._host is None else self._host.parameters

    def _build(self, model: nn.Module) -> None:
        """Builds this rank's stage and meets the ranks that it works with."""
        environment, topology, rendezvous = self._worker.environment, self._worker.topology, self._worker.rendezvous
        if environment.global_batch:
            share_of_batch(0, environment, 0)  # refuses a global batch that is too small for D replicas
        stages = stage_sections(environment.stage_starts, topology.p, len(self._model_map.sections))
        own = stages[topology.stage]
        self._stage: Stage = build_stage(model, self._model_map, own.start, own.stop, self._device)
        parameters = self._stage.parameters
        tied = tied_over_stages(self._model_map.shared, stages)
        self._timeline = Timeline.from_environ(os.environ, rank=topology.rank, p=topology.p)
        links = connect_links(topology, rendezvous, self._device, self._worker.departure, self._timeline)
        replicas = rendezvous.group(f"replicas/{topology.stage}", topology.ranks_of((topology.stage,)))
        tied_groups = connect_tied(topology, rendezvous, tied)
        self._everyone = rendezvous.group("everyone", topology.everyone)
        self._reducer = GradientReducer(
            parameters,
            replicas,
            tied_groups,
            counted=[
                name
                for name in parameters
                if topology.replica == 0 and tied.get(name, (topology.stage,))[0] == topology.stage
            ],
            timeline=self._timeline,
        )
        copy_from_first(list(parameters.values()), replicas)
        for group in tied_groups:
            copy_from_first([parameters[name] for name in group.names], group.group)
        self._agree_on_seed()
        position = Position(
            stage=topology.stage,
            p=topology.p,
            policy=Policy(environment.policy),
            run_ahead=environment.run_ahead,
            recompute=bool(environment.recompute) and environment.recompute[topology.stage],
        )
        self._engine = Engine(
            self._stage,
            position,
            links,
            self._device,
            self._worker.departure,
            forward_context=self._precision.forward,
            timeline=self._timeline,
        )

    def _agree_on_seed(self) -> None:
        # In halves: gloo's int64 would do, but a seed may use all 64 bits unsigned.
        halves = torch.tensor([self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF], dtype=torch.int64)
        copy_from_first([halves], self._everyone)
        low, high = halves.tolist()
        self._seed = high << 32 | low

    # What nn.Module's users look at

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters, by their names in the user's model."""
        for name, parameter in self._parameters_here.items():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This stage's parameters by their names in the user's model. To save the whole, call `checkpoint`."""
        return {name: parameter.detach() for name, parameter in self._parameters_here.items()}

    def train(self, mode: bool = True) -> Self:
        """Sets training mode (or, with False, evaluation mode) in the user's model."""
        self.training = mode
        if self._worker.environment.mode is Mode.TRAIN:
            self._stage.module.train(mode)
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

        In a calibration generation this measures the profile and then ends the script (SystemExit with code 0).

        Args:
            loss_scale: for fp16 alone: a number, which then stays; or "dynamic": halved when gradients overflow,
                doubled after 2000 steps without.
            init_loss_scale, min_loss_scale: where a dynamic scale starts, and the least it becomes.

        Raises:
            ValueError: the optimizer holds a parameter that is not of this stage, or a scale is no positive number.
        """
        own = {id(parameter) for parameter in self._parameters_here.values()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise ValueError(
                        f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not of this stage: "
                        "make the optimizer after wrapping the model, from the Varuna object's parameters()"
                    )
        self._optimizer = optimizer
        if self._precision.needs_scale:
            self._scaler = LossScaler(loss_scale, init_loss_scale, min_loss_scale)
            self._registered[_LOSS_SCALE] = self._scaler
        if self._worker.environment.mode is Mode.CALIBRATE:
            self._calibrate(optimizer)

    def _calibrate(self, optimizer: Optimizer) -> NoReturn:
        environment = self._worker.environment
        self._say_ready()
        try:
            profile = calibrate(
                self._calibrated_model[0],
                self._model_map,
                self._get_batch,
                optimizer=optimizer,
                device=self._device,
                precision=self._precision,
                optimizer_on_device=not self._offload_optimizer,
                global_batch=environment.global_batch,
                rank=environment.rank,
                world_size=environment.world_size,
                store=self._worker.rendezvous.store,
                connect=self._worker.rendezvous.gloo,
            )
        except torch.distributed.DistError as error:  # a peer went away: that is no fault of the script's
            self._worker.departure.leave(PeerLost(f"while calibrating: {first_line(error)}"))
            self._worker.departure.check()
            raise
        if profile is not None:
            self._worker.link.profile_done(profile.to_json())
        raise SystemExit(0)

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
        clip_factor(0.0, clip_grad_max_norm)  # refuses a bad bound before any work is done
        self._worker.departure.check()
        self._saves.at_boundary(self._step, self._training_state)
        self._say_ready()
        self._broken = True
        scale = self.loss_scale
        passed, expected = self._train_pass(inputs, scale)
        self._reducer.reduce()
        self._timeline.end()
        totals = agree(
            self._everyone,
            Totals(
                loss_sum=passed.loss_sum,
                examples=passed.examples,
                squared_norm=self._reducer.squared_norm(),
                wishes=self._saves.wishes(),
            ),
        )
        loss = totals.loss
        # Backwards were weighted for the agreed batch; the batch of this step may have been another.
        correction = expected / totals.examples / scale
        norm = math.sqrt(totals.squared_norm) * correction
        # Every gradient of the model is in this norm, which is the same on all ranks; so is what they conclude from it.
        overflow = self._scaler is not None and not math.isfinite(totals.squared_norm)
        self._update(optimizer, correction * clip_factor(norm, clip_grad_max_norm), skip=overflow)
        self._step += 1
        self._broken = False
        self._saves.agree(totals.wishes)
        self._report(loss, totals.examples, passed, time.perf_counter_ns() - began_ns)
        return loss, overflow, norm

    def _update(self, optimizer: Optimizer, factor: float, *, skip: bool) -> None:
        """Multiplies the gradients with `factor` and steps the optimizer, unless they have overflowed (`skip`)."""
        if not skip:
            scale_gradients(self._stage.parameters.values(), factor)
        if self._host is not None:
            self._host.take_gradients()
        if not skip:
            optimizer.step()
            if self._host is not None:
                self._host.put_back()
        if self._scaler is not None:
            self._scaler.update(overflow=skip)

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step will be multiplied with for its backward; 1 without fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def _train_pass(self, inputs: Mapping[str, Any], loss_scale: float) -> tuple[PassResult, int]:
        """Forward and backward; with it, the number of examples for which the gradients were weighted."""
        for parameter in self._stage.parameters.values():
            parameter.grad = None
        environment = self._worker.environment
        examples = batch_size_of(inputs)
        sizes, first = share_of_batch(examples, environment, self._worker.topology.replica)
        expected = environment.global_batch or max(examples, 1)
        micro_batches = cut_inputs(inputs, sizes, first)
        with self._precision.whole_pass():
            passed = self._engine.train(
                micro_batches,
                global_batch=expected,
                seed=self._seed,
                step=self._step + 1,
                loss_scale=loss_scale,
                before_last_backward=self._reducer.start,
            )
        return passed, expected

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None) -> float:
        """The mean loss over all replicas' `inputs`, in evaluation mode and without gradients. Called by all ranks.

        `inputs` may hold any number of examples on each replica; `batch_size`, their total, is checked when given.
        """
        self._worker.departure.check()
        sizes, first = share_of_batch(batch_size_of(inputs), self._worker.environment, self._worker.topology.replica)
        with _evaluating(self._stage.module), self._precision.whole_pass():
            passed = self._engine.evaluate(cut_inputs(inputs, sizes, first))
        totals = agree(self._everyone, Totals(loss_sum=passed.loss_sum, examples=passed.examples))
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
        if name in self._registered:
            raise ValueError(f"a state named {name!r} is registered already: give each its own name")
        self._registered[name] = state
        if name in self._unclaimed:  # registered after the checkpoint was loaded
            state.load_state_dict(self._unclaimed.pop(name))

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
        Returns when it is written, or, with `tmpdir` (or `tempdir`), as soon as the state is copied (to memory: it is
        not needed), unless `on_demand`. Writing is always shared out over the replicas (`shard`).

        Returns whether it is committed (with `tmpdir`: begun). A failed save is logged and does not stop training.
        """
        global_store = global_store or self.checkpoint_url
        if global_store is None:
            raise ValueError(
                "checkpoint() without a path: this process has no checkpoint store of its own; give one, or submit the "
                "script as a job"
            )
        checkpointer = self._checkpointer(global_store)
        wait_for_save(checkpointer, self._worker.departure)
        checkpointer.save(self._step if step is None else step, self._training_state())
        in_background = tmpdir is not None or tempdir is not None
        if in_background and not on_demand:
            return True
        outcome = wait_for_save(checkpointer, self._worker.departure)
        failed = outcome is None or outcome.result == "failed"
        # Rank 0 commits last, so when this reduction is through, the checkpoint is there for everybody.
        return agree(self._everyone, Totals(loss_sum=float(failed), examples=0)).loss_sum == 0

    def load_checkpoint(self, global_store: str, iteration: int, check_complete: bool = True) -> None:
        """Loads `varuna_ckpt_<iteration>` from `global_store`. Called by all ranks, after `set_optimizer`.

        It is always checked that the checkpoint is complete. Raises varuna.checkpoint.CheckpointError when it is not.
        """
        self._require_optimizer("load_checkpoint")
        self._loaded(load(str(global_store), iteration, self._training_state()))

    def resume(self) -> int:
        """Loads the newest complete checkpoint of the job; returns the number of steps it has behind it, 0 for none.

        Called by all ranks, after `set_optimizer`. Continue with step `resume() + 1`.
        """
        self._require_optimizer("resume")
        self._resumed = True
        environment, store = self._worker.environment, self._worker.rendezvous.store
        loaded: Loaded | None = None
        if environment.checkpoint_url:
            store.set_timeout(_LOAD_LIMIT)
            try:
                loaded = resume(
                    environment.checkpoint_url,
                    self._training_state(),
                    store=store,
                    rank=environment.rank,
                    world_size=environment.world_size,
                    report=lambda step, fault: _log.warning("checkpoint passed over", step=step, fault=fault),
                )
            except torch.distributed.DistError as error:
                self._worker.departure.leave(PeerLost(f"while resuming: {first_line(error)}"))
                self._worker.departure.check()
        if loaded is not None:
            self._loaded(loaded)
        self._say_ready()
        return self._step

    def _loaded(self, loaded: Loaded) -> None:
        if self._host is not None:
            self._host.put_back()
        self._step = loaded.step
        self._seed = loaded.seed
        self._unclaimed = dict(loaded.user)
        for name, state in self._registered.items():
            if name in self._unclaimed:
                state.load_state_dict(self._unclaimed.pop(name))
            else:
                _log.warning("the checkpoint has no state of this name", name=name, step=loaded.step)

    def _training_state(self) -> TrainingState:
        model_map = self._model_map
        kept = model_map.graph.buffers_changed | set(self._state_dict_names.values())
        section_of = {name: model_map.sections_of(name)[0] for name in self._parameters_here}
        for section in reversed(model_map.sections):
            section_of |= dict.fromkeys(section.buffers, section.index)
        return TrainingState(
            sections=self._stage.sections,
            section_count=len(model_map.sections),
            parameters=self._parameters_here,
            section_of=section_of,
            buffers={name: buffer for name, buffer in self._stage.buffers.items() if name in kept},
            tied=model_map.shared,
            optimizer=self._optimizer,
            user={name: state.state_dict() for name, state in self._registered.items()},
            seed=self._seed,
            state_dict=self._state_dict_names,
        )

    def _own_checkpointer(self) -> Checkpointer | None:
        """The one for automatic checkpoints; None when the job has no store, or is a calibration."""
        environment = self._worker.environment
        if not environment.checkpoint_url or environment.mode is Mode.CALIBRATE:
            return None
        return self._checkpointer(environment.checkpoint_url)

    def _checkpointer(self, global_store: str) -> Checkpointer:
        url = str(global_store)  # a Path will do
        if url not in self._checkpointers:
            environment = self._worker.environment
            self._checkpointers[url] = Checkpointer(
                url,
                generation=environment.generation,
                rank=environment.rank,
                p=environment.p,
                d=environment.d,
                on_committed=self._worker.link.checkpoint_done,
            )
        return self._checkpointers[url]

    # Reports

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
            self._worker.link.ready(self._step)

    def _report(self, loss: float, examples: int, passed: PassResult, step_ns: int) -> None:
        self._worker.link.step_done(
            worker_pb2.StepDone(
                step=self._step,
                loss=loss,
                step_us=step_ns // 1000,
                examples=examples,
                forward_us=passed.forward_us,
                backward_us=passed.backward_us,
                wait_us=passed.wait_us,
                memory_bytes=self._memory_bytes(),
            )
        )

    def _memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        resident: int = psutil.Process().memory_info().rss
        return resident


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block; afterwards every module is in the mode that it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _finish_saves(checkpointers: Mapping[str, Checkpointer], departure: Departure) -> None:
    """At the end of the script: waits for saves that are still being written, unless the worker was to leave."""
    for checkpointer in checkpointers.values():
        while departure.exit_code is None and checkpointer.in_flight:
            checkpointer.wait(_LOOK_UP_S)
