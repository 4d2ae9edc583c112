"""The checkpoints of a training: what goes into them, when they may be written, and training from one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import structlog

from varuna.assembly.assembly import Assembly
from varuna.checkpoint import (
    CheckpointError,
    CheckpointRequest,
    LoadedCheckpoint,
    ShapePosition,
    StateScope,
    TrainingState,
    hugging_face,
)
from varuna.checkpoint.saving.shares import count_bytes
from varuna.checkpoint.script_states import RegisteredStates
from varuna.checkpoint.state.group_options import OptionsByName
from varuna.checkpoint.state.stage_state import held_state
from varuna.checkpoint.worker_checkpoints import WorkerCheckpoints
from varuna.distributed.agreement import BoundaryRequests, StepTotals, agree_on_totals
from varuna.distributed.groups import RankGroup
from varuna.holdings.held_state import HeldState
from varuna.model.script_changes import ScriptChanges
from varuna.optim.non_finite_steps import describe_non_finite
from varuna.optim.optimizers import left_out, list_tensor_attributes
from varuna.optim.parameter_updater import ParameterUpdater
from varuna.optim.precision import LossScaler
from varuna.optim.weight_average import AVERAGE_STATE
from varuna.partition import ModelMap, Stage
from varuna.roles.progress import TrainingProgress
from varuna.roles.wrapped_model import WrappedModel
from varuna.worker.agent_link import StateSources

__all__ = ["TrainingCheckpoints"]

_log = structlog.get_logger("varuna")

_CHANGES_STATE = "varuna.model.script_changes"
"""The name under which checkpoints keep what the script has changed in the model since it was wrapped."""

_LOSS_SCALE_STATE = "varuna.loss_scale"
"""The name under which checkpoints keep the state of the loss scale."""


class TrainingCheckpoints:
    """Saves and loads the state of one rank's training, together with the other ranks."""

    def __init__(
        self,
        wrapped: WrappedModel,
        assembly: Assembly,
        updater: ParameterUpdater,
        *,
        changes: ScriptChanges,
        progress: TrainingProgress,
    ) -> None:
        self._worker = wrapped.worker
        self._updater, self._changes, self._progress = updater, changes, progress
        self._tensor_names = wrapped.tensor_names
        self.follow_stage(assembly.stage)
        self.registered = RegisteredStates()
        if updater.average is not None:
            self.registered.register_state(AVERAGE_STATE, updater.average, per=StateScope.JOB)
        if (description := hugging_face.ModelDescription.from_model(wrapped.model)) is not None:
            self.registered.register_state(hugging_face.STATE, description, per=StateScope.JOB)
        self.registered.register_state(_CHANGES_STATE, changes, per=StateScope.JOB)
        self.were_loaded = False
        """Whether the script has loaded a checkpoint, or looked for one."""
        self._loaded_options: OptionsByName | None = None
        """Of the state from which no step has begun yet; None: there is none."""
        self.sources = StateSources()
        """Of the state that was loaded."""
        self.state_bytes = 0
        """Of the state that this process holds, as counted last; 0: not counted yet."""
        self._counts_optimizers = False
        """Whether `state_bytes` has state of the optimizers, which is there after their first update."""
        self._has_warned = False
        self._everyone = assembly.everyone
        self.hold_stage(wrapped.model_map)
        self.checkpointing = WorkerCheckpoints(self._worker, self._everyone)

    def follow_stage(self, stage: Stage) -> None:
        """From now on checkpoints have what this stage holds, when `hold_stage` has been called."""
        host = self._updater.host
        self._parameters = stage.parameters if host is None else host.parameters
        self._hold_state = partial(held_state, stage=stage, parameters=self._parameters, state_dict=self._tensor_names)

    def follow_ranks(self, everyone: RankGroup, model_map: ModelMap) -> None:
        """From now on this process saves and loads as its rank among `everyone`. A save under way is not waited for."""
        self._everyone = everyone
        self.hold_stage(model_map)
        self.checkpointing = WorkerCheckpoints(self._worker, everyone, before=self.checkpointing)

    def hold_stage(self, model_map: ModelMap) -> None:
        """From now on checkpoints have what the stage holds by this map."""
        environment = self._worker.environment
        place = ShapePosition(rank=environment.rank, p=environment.plan.p, d=environment.plan.d)
        self.held = self._hold_state(model_map, place=place)

    def count_state(self, *, late_bytes: int = 0) -> None:
        """Counts the bytes of the state that this process holds: parameters, buffers, optimizers' state, averages.

        `late_bytes`: of the optimizers' state that is not there yet.
        """
        average = self._updater.average
        averages = {} if average is None else average.averages
        state = replace(self.held, optimizers=self._updater.optimizers, averages=averages)
        self.state_bytes = late_bytes + sum(count_bytes(name, state) for name in state.tensors)
        self._counts_optimizers = late_bytes > 0 or self._have_optimizers_state()

    def count_updated_state(self) -> None:
        """Counts the state after an update, unless it has been counted since the optimizers' first one. Warns once of
        what no checkpoint holds."""
        if not self.state_bytes or (not self._counts_optimizers and self._have_optimizers_state()):
            self.count_state()
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_lost_tensors()

    def _warn_of_lost_tensors(self) -> None:
        """After an update, by which optimizers have made what they keep."""
        environment = self._worker.environment
        if self._worker.topology.replica or not (environment.agent_socket or environment.checkpoint_url):
            return
        for optimizer in self._updater.optimizers:
            if names := list_tensor_attributes(optimizer):
                _log.warning(
                    f"{type(optimizer).__name__} keeps tensors in {', '.join(names)}, where no checkpoint finds them: "
                    "if they are state, a restart loses it; keep it in optimizer.state"
                )

    def _have_optimizers_state(self) -> bool:
        return any(optimizer.state for optimizer in self._updater.optimizers)

    def hold_scaler(self, scaler: LossScaler) -> None:
        self.registered.register_state(_LOSS_SCALE_STATE, scaler, per=StateScope.JOB, replace=True)

    # Saving

    def boundary_requests(self) -> BoundaryRequests:
        """What this rank wants at the next boundary between steps."""
        return self.checkpointing.automatic.choose_requests(self._progress.step + 1)

    def set_boundary_requests(self, requests: BoundaryRequests) -> None:
        """Notes what all ranks want at the next boundary between steps."""
        self.checkpointing.automatic.record_agreement(requests)

    def record_copies(self, *, are_whole: bool) -> None:
        """Notes whether other VMs have whole copies of the state, by which saves are more or less often."""
        self.checkpointing.automatic.record_copies(are_whole=are_whole)

    def save_automatic_checkpoint(self) -> None:
        """Between steps: writes the checkpoint that all ranks have agreed on; it holds no gradients. The state must not
        change before `finish_copy`."""
        automatic = self.checkpointing.automatic
        self._updater.agree_on_drop()
        if self._updater.accumulation.is_pending:
            return
        if automatic.keeps_state:
            self._changes.exchange_changes()
        automatic.apply_agreement(self._progress.step, self.training_state, self._find_fault)

    def finish_copy(self) -> None:
        """Waits until the state that an automatic checkpoint holds may change."""
        self.checkpointing.automatic.finish_copy()

    def save_checkpoint(
        self, url: str, step: int | None, *, request: CheckpointRequest, tmpdir: str | None, in_background: bool
    ) -> None:
        self._progress.check_state()
        if (fault := self._find_fault()) is not None:
            raise CheckpointError(f"checkpoint(): {fault}, so no training could resume from this checkpoint")
        if self._updater.accumulation.is_pending:
            _log.warning("the checkpoint does not contain the gradients that await the next optimizer.step()")
        self._changes.exchange_changes(may_evaluate=True)
        self.checkpointing.save_checkpoint(
            url,
            self._progress.step if step is None else step,
            self.training_state(),
            request=request,
            tmpdir=tmpdir,
            in_background=in_background,
        )

    def _find_fault(self) -> str | None:
        """Why a checkpoint of the parameters would be of no use. Called by all ranks."""
        return describe_non_finite(self._parameters, self._everyone)

    def training_state(self) -> TrainingState:
        """The state of this rank: a view on the live tensors."""
        average = self._updater.average
        held = self.held if average is None else replace(self.held, start_averages=average.start_averages)
        return replace(
            held,
            optimizers=self._updater.optimizers,
            schedulers=self.registered.schedulers,
            averages={} if average is None else average.averages,
            user=self.registered.collect_states(),
            user_scopes=self.registered.scopes,
            seed=self._progress.seed,
            cursor=self._progress.samples.cursor,
        )

    # Loading

    def load_checkpoint(self, url: str, step: int) -> None:
        """Loads the checkpoint of `step`. Raises ValueError when the ranks name different steps."""
        self.were_loaded = True
        mean = agree_on_totals(self._everyone, StepTotals(loss_sum=float(step), examples=1, weight=1)).loss
        if mean != step:
            raise ValueError(
                f"load_checkpoint({step}): other ranks give another iteration (the mean is {mean:g}); "
                "give every rank the same"
            )
        self.continue_from(self.checkpointing.load_checkpoint(url, step, self._state_to_load()))

    def resume_training(self, *, allow_fresh_start: bool) -> None:
        """Loads the newest checkpoint of the job, if there is one."""
        self.were_loaded = True
        self._worker.phases.end_phase("script")
        loaded = self.checkpointing.resume_newest(
            self._state_to_load(),
            memory=HeldState.from_environment(self._worker.environment, self._worker.rendezvous.store),
            allow_fresh_start=allow_fresh_start,
        )
        if loaded is not None:
            self.continue_from(loaded)
        self._worker.phases.end_phase("load")

    def _state_to_load(self) -> TrainingState:
        """The state of this rank, which is half of another step from the first change until `continue_from`."""
        return replace(self.training_state(), before_load=self._progress.begin_load)

    def continue_from(self, loaded: LoadedCheckpoint) -> None:
        """The parameters and the optimizers' state are loaded; the rest follows them."""
        self.were_loaded = True
        self._loaded_options = loaded.options
        average = self._updater.average
        self.sources = StateSources(peer_bytes=loaded.peer_bytes, store_bytes=loaded.bytes_read - loaded.peer_bytes)
        self._updater.accumulation.drop_gradients()
        self._progress.step = loaded.step
        self._progress.samples.load_cursor(loaded, self._worker.environment)
        self._progress.seed = loaded.seed
        self.registered.load_states(loaded)
        self._progress.is_half_loaded = False
        if average is not None and not loaded.averaged:
            average.reset_averages()
            _log.warning(
                "the checkpoint has no average of the parameters: it starts from them",
                step=loaded.step,
            )
        if average is None and loaded.averaged:
            _log.warning("the checkpoint's average of the parameters is not loaded: give Varuna(ema=...) to keep it")

    def explain_lost_groups(self) -> str:
        """Why the first step from a loaded state cannot begin: the state was trained with a parameter group that the
        script has not added again. Empty: it can, and later steps are not examined."""
        options = self._loaded_options
        trained = {} if options is None else self._changes.select_trained(self._parameters)
        lost = [] if options is None else options.list_lost(left_out(self._updater.optimizers, trained))
        if not lost:
            self._loaded_options = None
            return ""
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return (
            f"{lost[0]}{more} trained in a parameter group before, and no optimizer holds it now, so nothing would "
            "train it: call add_param_group() before resume(), or freeze it with requires_grad_(False) after that"
        )
