"""Steps whose loss or gradient is not finite, and what they must not do to a run.

A NaN that reaches the parameters stays in them and in the next checkpoints. So such a step changes nothing: no
parameter, no state of the optimizer, no statistics that a forward keeps. Many such steps in a row mean that the run has
diverged; they end it while its last good checkpoint still exists. A job file may also ask for the end at the first such
step, or for the updates that plain PyTorch makes. All ranks decide from the same agreed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import structlog
import torch
from torch import nn

from varuna.distributed.agreement import StepTotals, agree_on_totals
from varuna.distributed.groups import RankGroup
from varuna.optim.precision import LossScaler
from varuna_proto.environment import OnNonFinite

__all__ = [
    "NonFiniteSteps",
    "check_max_non_finite_steps",
    "describe_non_finite",
    "first_non_finite_parameter",
]

_log = structlog.get_logger("varuna")

_MOST_IN_A_ROW = 10
"""Steps in a row that are skipped if the script gives no number."""
_WAY_OUT = "Check these batches, the learning rate and its warm-up, and clip the gradient"
_OTHER_WAY = "a stage may have read what only another stage has, which is not a number here: that is so where forward"
_IN_TRAINING = (
    f"{_OTHER_WAY} takes another way than in the dry run. Let the example inputs (get_batch_fn) take that way"
)
_IN_EVALUATION = f"{_OTHER_WAY} takes another way than in training, by self.training, an attribute or the inputs"


class NonFiniteSteps:
    """Skips such steps up to a bound, ends the run at the first, or lets them pass."""

    def __init__(
        self,
        most_in_a_row: int | None,
        policy: OnNonFinite,
        *,
        logs: bool,
        in_stages: bool = False,
        looks_at_values: bool = False,
    ) -> None:
        """`most_in_a_row`: the script's bound, if it gives one. `policy`: the job file's, which comes before the bound
        unless it is SKIP. `logs`: whether this rank writes the log lines. `in_stages`: whether the model is cut.
        `looks_at_values`: whether the way of its forward depends on inputs or buffers."""
        self._most = _MOST_IN_A_ROW if most_in_a_row is None else most_in_a_row
        self._policy = policy
        self._logs = logs
        self._in_stages, self._looks_at_values = in_stages, looks_at_values
        self.in_a_row = 0
        """Such steps in a row so far, without those that a smaller loss scale may cure."""
        self._skipped = 0
        if logs and most_in_a_row is not None and policy is not OnNonFinite.SKIP:
            _log.warning(
                "the job file's on_nonfinite takes precedence over the script's max_non_finite_steps",
                on_nonfinite=policy.value,
                max_non_finite_steps=most_in_a_row,
            )

    @property
    def lets_pass(self) -> bool:
        """Whether such a step changes all that it changes in plain PyTorch."""
        return self._policy is OnNonFinite.GO_ON

    def set_logging(self, *, logs: bool) -> None:
        self._logs = logs

    def count_anew(self) -> None:
        """Forgets the steps in a row so far, which new ranks do not know. To be called on all ranks."""
        self.in_a_row = 0

    def leaves_no_trace(self, loss: float, norm: float) -> bool:
        """Whether a step with this agreed loss and gradient norm must not change the buffers that forward writes."""
        return not (self.lets_pass or (math.isfinite(loss) and math.isfinite(norm)))

    def decide_skip(self, step: int, loss: float, norm: float, scaler: LossScaler | None) -> bool:
        """Whether to skip the update of `step`. Called after every step, with values that all ranks have agreed on.

        Raises FloatingPointError after too many in a row. Steps that a smaller loss scale may cure do not count. With a
        loss scale, a gradient that is not finite is always skipped, as by PyTorch's own scaler.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return False
        skips = not self.lets_pass or (scaler is not None and not math.isfinite(norm))
        self._skipped += skips
        if scaler is not None and scaler.can_shrink and math.isfinite(loss):
            return True  # the scaler logs it
        self.in_a_row += 1
        if self._logs and self.in_a_row == 1 and self._in_stages and self._looks_at_values and math.isnan(loss):
            _log.warning(_IN_TRAINING, step=step)
        if self._policy is OnNonFinite.STOP:
            raise FloatingPointError(
                f"step {step} has a loss or gradient that is not finite (loss {loss:g}, gradient norm {norm:g}; "
                f"on_nonfinite: stop). It has not changed the parameters. {_WAY_OUT}"
            )
        if self.in_a_row > self._most and not self.lets_pass:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite, the last in step {step} "
                f"(loss {loss:g}, gradient norm {norm:g}; max_non_finite_steps={self._most}). They have not changed "
                f"the parameters. {_WAY_OUT}"
            )
        if not skips:
            if self._logs and self.in_a_row == 1:
                _log.warning(
                    "this step's loss or gradient is not finite, and its update is made (on_nonfinite: go_on)",
                    step=step,
                    loss=loss,
                    gradient_norm=norm,
                )
        elif self._logs:
            _log.warning(
                "step skipped: its loss or gradient is not finite",
                step=step,
                loss=loss,
                gradient_norm=norm,
                in_a_row=self.in_a_row,
                skipped=self._skipped,
            )
        return skips

    def explain_evaluation(self, loss: float) -> None:
        """Writes the likely cause of an evaluation's loss that is not a number."""
        if self._logs and self._in_stages and math.isnan(loss):
            _log.warning(_IN_EVALUATION)


def check_max_non_finite_steps(most_in_a_row: int | None) -> None:
    """Raises ValueError for a bad bound."""
    if most_in_a_row is None:
        return
    if isinstance(most_in_a_row, bool) or not isinstance(most_in_a_row, int) or most_in_a_row < 0:
        raise ValueError(
            f"max_non_finite_steps={most_in_a_row!r}: give the number of steps in a row that may be skipped "
            "because their loss or gradient is not finite; 0 ends the run at the first such step"
        )


def first_non_finite_parameter(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """The name of the first trained parameter with an element that is not finite."""
    trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad and p.numel()}
    if not trained:
        return None
    largest = torch._foreach_norm(list(trained.values()), torch.inf)
    finite = torch.stack(largest).isfinite().tolist()
    return next((name for name, is_finite in zip(trained, finite, strict=True) if not is_finite), None)


def describe_non_finite(parameters: Mapping[str, nn.Parameter], everyone: RankGroup) -> str | None:
    """Which trained parameters are not finite, in words; None if all are, on all ranks. Called by all ranks."""
    name = first_non_finite_parameter(parameters)
    ranks = agree_on_totals(everyone, StepTotals(loss_sum=float(name is not None), examples=0)).loss_sum
    if not ranks:
        return None
    here = f"parameter {name} is" if name is not None else f"parameters of {ranks:.0f} other rank(s) are"
    return f"{here} not finite"
