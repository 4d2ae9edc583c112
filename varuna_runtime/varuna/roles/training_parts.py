"""What one rank trains with. Its steps use it, and so does a change of generation, which gives it other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from varuna.assembly.assembly import agree_on_seed, assemble_alone, assemble_rank, stages_of
from varuna.assembly.connections import LINK_KINDS, LinkKind
from varuna.copies.ahead_taker import AheadTaker
from varuna.copies.parting import Parting
from varuna.copies.rank_ahead import RankAhead
from varuna.copies.rank_copies import RankCopies
from varuna.copies.rank_shares import RankShares
from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.tensorboard import TensorBoardWriter
from varuna.model.fixed_module import ModelSurface
from varuna.model.script_changes import ScriptChanges
from varuna.model.state_dicts import gather_state
from varuna.model.tensor_swap import TensorSwap
from varuna.optim.host_parameters import HostParameters
from varuna.optim.non_finite_steps import NonFiniteSteps, check_max_non_finite_steps
from varuna.optim.optimizers import allow_empty_stages
from varuna.optim.parameter_updater import ParameterUpdater
from varuna.optim.weight_average import WeightAverage, check_decay
from varuna.partition.tracing.retracer import Retracer
from varuna.pipeline.loss_weight import ExpectedWeight
from varuna.roles.checkpoints import TrainingCheckpoints
from varuna.roles.failing import ScriptHabits
from varuna.roles.kept_inputs import KeptInputs
from varuna.roles.late_state import LateSource, LateState
from varuna.roles.moved_sums import add_sums
from varuna.roles.progress import TrainingProgress, TrainingStep
from varuna.roles.role import apply_seed
from varuna.roles.wrapped_model import WrappedModel
from varuna.worker.worker import CopiesFigures

__all__ = ["TrainingOptions", "TrainingParts"]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train: the arguments of `Varuna` with these names. Raises ValueError for a bad value."""

    offload_optimizer: bool = False
    ema: float | None = None
    max_non_finite_steps: int | None = None
    accumulate: bool = False
    links: LinkKind = "gloo"

    def __post_init__(self) -> None:
        if self.links not in LINK_KINDS:
            raise ValueError(f"links={self.links!r}: give one of {', '.join(map(repr, LINK_KINDS))}")
        check_decay(self.ema)
        check_max_non_finite_steps(self.max_non_finite_steps)


class TrainingParts:
    """The parts of one rank's training.

    Attributes:
        assembly: the rank with its stage, connected to the others of its generation.
        link_kind: what carries messages between stages.
        wrapped_map: of the model as the script has wrapped it.
        model_map: by which the stage runs: that of the newest trace.
        surface: what the script sees of the model.
        scalars: where each step's figures go for TensorBoard.
        copies: of the present generation; None: before its first step here, or no copies are kept.
        shares: the same, of the share of the step under way.
        parting: what ranks that do not go on have left to others in the step under way; None: nothing.
        ahead: sends the state ahead to the ranks of the next shape; None: before the first step of the generation.
        taken_ahead: what this process has of the state that others had before it had a rank.
        late: what this process awaits of the step under way and for its update; None: nothing.
        inputs: of the step under way, where the script has a loader of its own.
    """

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
        """As for `TrainingRole`."""
        self.worker, self.device, self.precision = wrapped.worker, wrapped.device, wrapped.precision
        self.link_kind = options.links
        environment = self.worker.environment
        self.non_finite = NonFiniteSteps(
            options.max_non_finite_steps,
            environment.on_non_finite,
            logs=environment.rank == 0,
            in_stages=self.worker.topology.p > 1,
            looks_at_values=bool(wrapped.model_map.graph.looked_at),
        )
        self.scalars = scalars
        joins = environment.joins_survivors
        assemble = assemble_alone if joins else assemble_rank
        with keep_global_generators(self.device):
            self.assembly = assemble(
                wrapped.model,
                wrapped.model_map,
                self.worker,
                device=self.device,
                precision=self.precision,
                values=wrapped.values,
                link_kind=options.links,
            )
        stage, everyone = self.assembly.stage, self.assembly.everyone
        self.expected_weight = ExpectedWeight(self.assembly.replicas, self.device)
        self.progress = TrainingProgress(seed if joins else agree_on_seed(seed, everyone))
        host = HostParameters(stage.parameters) if options.offload_optimizer else None
        if self.worker.topology.p > 1:
            allow_empty_stages(self.device if host is None else torch.device("cpu"))
        parameters = stage.parameters if host is None else host.parameters
        average = None if options.ema is None else WeightAverage(parameters, options.ema)
        self.updater = ParameterUpdater(
            stage.parameters,
            parameters,
            host=host,
            average=average,
            accumulate=options.accumulate,
            is_anywhere=self._is_anywhere,
        )
        self.swap = TensorSwap(stage, parameters)
        progress = self.progress
        self.surface = ModelSurface(
            module=stage.module,
            parameters=self.swap.parameters,
            buffers=self.swap.buffers,
            device=self.device,
            seed=lambda: apply_seed(progress.seed, progress.step),
        )
        self._follow_surface = follow_surface
        self.wrapped_map = self.model_map = wrapped.model_map
        self.trace_digest = wrapped.trace_digest
        self._stored_names = wrapped.tensor_names
        self.retracer = Retracer(wrapped.model, wrapped.examples, self.stages)
        self.changes = ScriptChanges(
            wrapped.model,
            stage.module,
            stage.parameters,
            given_out=parameters,
            model_map=wrapped.model_map,
            everyone=everyone,
        )
        self.checkpoints = TrainingCheckpoints(
            wrapped, self.assembly, self.updater, changes=self.changes, progress=self.progress
        )
        self.habits = ScriptHabits()
        self.copies: RankCopies | None = None
        self.shares: RankShares | None = None
        self.parting: Parting | None = None
        self.ahead: RankAhead | None = None
        self.taken_ahead = taken_ahead
        if not joins:  # this process takes its whole state from elsewhere
            taken_ahead.close()
        self.late: LateState | None = None
        self.inputs = KeptInputs()

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those that the script sees and the optimizer steps, by first name."""
        return self.surface.parameters

    @property
    def section_count(self) -> int:
        return len(self.wrapped_map.sections)

    @property
    def stages(self) -> tuple[range, ...]:
        """The sections of each stage of the present generation."""
        return stages_of(self.worker, self.section_count)

    @property
    def lacks_state(self) -> bool:
        """Whether some of the state is to come before the update."""
        return self.late is not None and self.late.lacks_state

    @property
    def has_late_state(self) -> bool:
        """Whether all that is late is there for all ranks, though it may not be in its place yet."""
        return self.late is None or self.late.have_all()

    @property
    def can_copy_state(self) -> bool:
        """Whether the state is that after a step, and nothing waits to be added to it. The same on all ranks at the
        beginning of a step, though some may have filled what was late by then."""
        was_late = self.late is not None and self.late.has_lacked_state
        return self.progress.step > 0 and not was_late and not self.updater.accumulation.is_pending

    def _is_anywhere(self, here: bool) -> bool:
        """Whether something is so on any rank. Called by all ranks."""
        count = torch.tensor([float(here)], dtype=torch.float32)
        self.assembly.everyone.all_reduce([count])
        return bool(count)

    def find_copies_figures(self) -> CopiesFigures:
        """What is known of the generation's copies after a step."""
        states, marks = self.copies, self.shares
        return CopiesFigures(
            whole_step=0 if states is None else states.whole_step,
            obstacle="" if states is None else states.find_obstacle(),
            marks_obstacle="" if marks is None else marks.find_obstacle(),
        )

    def finish_captures(self) -> None:
        """Waits until nothing copies the state, which may change then."""
        self.checkpoints.finish_copy()
        if self.copies is not None:
            self.copies.finish_capture()
        if self.ahead is not None:
            self.ahead.end_pass()

    def await_late_state(self, source: LateSource, *, end_move: Callable[[], None]) -> None:
        """Some of what a move brings is late. `LateState.begin` follows; arguments as there."""
        self.late = LateState(self.worker, source, add_sums=self._add_sums, end_move=end_move)

    def _add_sums(self, sums: Iterable[Mapping[str, Tensor]]) -> None:
        for one in sums:
            add_sums(self.assembly.stage.parameters, one)

    @property
    def late_bytes(self) -> int:
        """Of the state that is to come from other ranks before the update."""
        return 0 if self.late is None else self.late.bytes

    def add_late_sums(self, *, waits: bool = False) -> bool:
        """Adds the sums that are late to the gradients, if they have come. Returns whether the gradients have all.

        `waits`: for those that have not; raises as a worker that leaves.
        """
        if self.late is None:
            return True
        if waits:
            self.late.wait_for_sums()
        return self.late.add_sums()

    def fill_late_state(self) -> None:
        """Waits for what the update needs, if some of it is late. Raises as a worker that leaves."""
        if self.late is not None:
            self.late.fill()
            self.late = None

    def leave_late_state(self, step: TrainingStep | None) -> None:
        """The generation in which this process awaited late state has ended here.

        `step`: the call under way. Nothing of it is kept without its sums."""
        late, self.late = self.late, None
        if late is not None and not late.leave() and step is not None:
            step.drop_share()

    def show_tensors(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        """Makes the script see these of the model from now on."""
        self.surface = replace(self.surface, parameters=parameters, buffers=buffers)
        self._follow_surface(self.surface)

    def gather_state(self) -> dict[str, Any]:
        """The state of the whole model on rank 0, an empty dict on the others. Called by all ranks."""
        return gather_state(self.surface, self._stored_names, self.assembly.everyone, self.worker.topology)
