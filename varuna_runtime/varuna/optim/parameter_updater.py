"""The update at the end of a step: from gradients that all ranks have summed to parameters that have moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from varuna.optim.accumulation import Accumulation
from varuna.optim.host_parameters import HostParameters
from varuna.optim.precision import LossScaler
from varuna.optim.reduction import clip_factor, scale_gradients
from varuna.optim.script_steps import ReadOnlyGradients, step_optimizers, take_over_steps
from varuna.optim.weight_average import WeightAverage

__all__ = ["ParameterUpdater", "StepGradient"]


@dataclass(frozen=True, kw_only=True)
class StepGradient:
    """What all ranks agree on about the gradient in `.grad`."""

    weight: float
    """Of the step's examples."""
    correction: float
    """The factor that makes `.grad` the gradient of the mean loss."""
    norm: float
    """The L2 norm of the whole model's gradient after the correction."""
    overflow: bool
    """Whether the sum of the squares was not finite before the correction."""


class ParameterUpdater:
    """Makes of each step's gradient an update, a part of a later update, or nothing.

    Attributes:
        optimizers: the script's, in their order.
        scaler: of the loss, for fp16.
        host: the parameters that the optimizers step, where they are on the host.
        average: of the parameters, where one is kept.
    """

    def __init__(
        self,
        stage_parameters: Mapping[str, nn.Parameter],
        parameters: Mapping[str, nn.Parameter],
        *,
        host: HostParameters | None,
        average: WeightAverage | None,
        accumulate: bool,
        is_anywhere: Callable[[bool], bool] = bool,
    ) -> None:
        """`stage_parameters` are those of the passes, `parameters` those that the optimizers step. `is_anywhere`:
        whether what this rank passes is true of any rank; a collective."""
        self.optimizers: tuple[Optimizer, ...] = ()
        self.scaler: LossScaler | None = None
        self.host, self.average = host, average
        self.accumulation = Accumulation(accumulate)
        self._stage_parameters, self._parameters = stage_parameters, parameters
        self._read_only = ReadOnlyGradients()
        self._is_anywhere = is_anywhere
        self._keeps_gradients = False
        """Whether the script has left this rank any of the gradients that await an update, as last checked."""

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on the optimizers step when this object says so, and not when the script does."""
        self.optimizers = tuple(optimizers)
        for optimizer in optimizers:
            take_over_steps(optimizer, self._handle_script_step)

    def follow_stage(
        self, stage_parameters: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """From now on these are the parameters. No gradients are accumulated."""
        self._stage_parameters, self._parameters = stage_parameters, parameters
        self._read_only = ReadOnlyGradients()

    def check_gradients(self) -> None:
        """At the beginning of a step: finds the gradients that the script has dropped; `agree_on_drop` follows.

        Raises RuntimeError when the script has changed them to something else.
        """
        kept = self._read_only.check_gradients()
        if kept is None or not self.accumulation.is_pending:
            return
        ids = {id(parameter) for parameter in kept}
        # The script cannot drop by `optimizer.zero_grad()` what no optimizer holds.
        held = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
        self._keeps_gradients = any(id(parameter) in ids for parameters in held for parameter in parameters)
        if self.host is not None:
            self.host.drop_gradients(ids)

    def agree_on_drop(self) -> None:
        """After `check_gradients`: nothing is accumulated any longer if the script has left no rank a gradient.

        Called by all ranks. Those whose parameters are all frozen have nothing to find a drop by, and must know of it:
        a collective of one number, while gradients await an update. Where a gradient is left (of another optimizer,
        say), all steps count, those without a gradient as zeros.
        """
        if self.accumulation.is_pending and not self._is_anywhere(self._keeps_gradients):
            self.accumulation.drop_gradients()

    def finish_step(self, gradient: StepGradient, clip_max_norm: float | None, *, skip: bool) -> None:
        """Uses the gradient of a step; with `skip` nothing changes but the loss scale."""
        accumulation, parameters = self.accumulation, self._stage_parameters
        if accumulation.is_active and skip:
            accumulation.restore_gradients(parameters.values())
        elif accumulation.is_active:
            scale_gradients(parameters.values(), gradient.correction)
            accumulation.keep_gradients(gradient.weight, gradient.norm, clip_max_norm)
            if self.host is not None:  # where the script reads and drops them
                self.host.copy_gradients_to_host()
        elif skip:
            if self.host is not None:
                self.host.move_gradients_to_host()
        else:
            clip = clip_factor(gradient.norm, clip_max_norm)
            self._update(gradient.correction * clip, gradient.norm * clip)
            accumulation.count_update()
        if self.scaler is not None:
            self.scaler.update_scale(overflow=gradient.overflow)

    def watch_gradients(self) -> None:
        """At the end of a step: what the script finds in `.grad` from now on, it must not change."""
        self._read_only.record_gradients(self._parameters.values())

    def _update(self, factor: float, norm: float) -> None:
        """Multiplies the gradients with `factor` and steps the optimizers. `norm`: of the gradient after that."""
        scale_gradients(self._stage_parameters.values(), factor)
        if self.average is not None:
            self.average.add_trained_parameters()
        step_optimizers(self.optimizers, norm, () if self.host is None else self.host.start_moving_gradients())
        if self.average is not None:
            self.average.update_averages()

    def _handle_script_step(self, optimizer: Optimizer) -> bool:
        """The script calls `optimizer.step()`: makes the update if it accumulates; returns whether it does.

        The first of several optimizers whose turn it is makes the update of all.
        """
        accumulation = self.accumulation
        if not accumulation.is_active:
            accumulation.check_script_step(optimizer, self.optimizers)
            return False
        if accumulation.is_pending:
            self.check_gradients()
            self.agree_on_drop()
        if accumulation.is_pending:
            accumulation.begin_update(optimizer, self.optimizers)
            clip = clip_factor(accumulation.norm, accumulation.clip_max_norm)
            self._update(clip, accumulation.norm * clip)
            accumulation.drop_gradients()
            self.watch_gradients()
        accumulation.note_script_step(optimizer)
        return True
