"""The methods that `Varuna` calls in its role, and the common part of calibration and inspection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from torch.optim import Optimizer

from varuna.checkpoint import CheckpointRequest, StateScope
from varuna.checkpoint.script_states import RegisteredStates, Stateful
from varuna.model.fixed_module import ModelSurface
from varuna.optim.optimizers import check_parameters
from varuna.optim.precision import LossScaler
from varuna.partition.stages.initial_values import derived_seed
from varuna.roles.wrapped_model import WrappedModel
from varuna.worker.agent_link import StateSources
from varuna.worker.worker import WorkerProcess

__all__ = ["ReportRole", "VarunaRole", "apply_seed", "missing_optimizer", "report_ready"]


class VarunaRole(Protocol):
    """The methods of a role. Each one does what the documentation of `Varuna` promises."""

    @property
    def surface(self) -> ModelSurface:
        """The model as the script sees it."""

    @property
    def loss_scale(self) -> float: ...

    def set_mode(self, training: bool) -> None:
        """Sets training or evaluation mode."""

    def set_optimizers(self, optimizers: Sequence[Optimizer], scaler: LossScaler | None) -> None:
        """`scaler`: scales the loss of fp16."""

    def train_step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None) -> tuple[float, bool, float]: ...

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None, *, ema: bool) -> float: ...

    def gather_state(self) -> dict[str, Any]: ...

    def register_state(self, name: str, state: Stateful, per: StateScope) -> None: ...

    def save_checkpoint(
        self, url: str, step: int | None, *, request: CheckpointRequest, tmpdir: str | None, in_background: bool
    ) -> None: ...

    def load_checkpoint(self, url: str, step: int) -> None: ...

    def resume(self, *, allow_fresh_start: bool) -> int: ...


class ReportRole:
    """Calibration and inspection: the script ends with a report at `set_optimizer`, and trains nothing before."""

    activity = ""
    """The verb for messages: calibrates, inspects."""

    def __init__(self, wrapped: WrappedModel, seed: int) -> None:
        self.wrapped = wrapped
        self.parameters = dict(wrapped.model.named_parameters())
        self.surface = ModelSurface(
            module=wrapped.model,
            parameters=self.parameters,
            buffers=dict(wrapped.model.named_buffers()),
            device=wrapped.device,
            seed=lambda: apply_seed(seed, 0),
        )
        self._registered = RegisteredStates()

    @property
    def loss_scale(self) -> float:
        return 1.0

    def set_mode(self, training: bool) -> None:
        """Nothing: the report does not depend on the mode that the script sets now."""

    def set_optimizers(self, optimizers: Sequence[Optimizer], scaler: LossScaler | None) -> None:
        """Ends the script (SystemExit with code 0) with the report."""
        check_parameters(optimizers, self.parameters)
        self.check_optimizers(optimizers)
        report_ready(self.wrapped.worker, 0, StateSources())
        self.make_report(optimizers)
        raise SystemExit(0)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises ValueError for optimizers that no report can be made with."""

    def make_report(self, optimizers: Sequence[Optimizer]) -> None:
        """Measures or describes the model, and hands the result over."""
        raise NotImplementedError

    def train_step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None) -> NoReturn:
        raise missing_optimizer("step")

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None, *, ema: bool) -> NoReturn:
        raise self._not_trained("evaluate")

    def gather_state(self) -> NoReturn:
        raise self._not_trained("full_state_dict")

    def register_state(self, name: str, state: Stateful, per: StateScope) -> None:
        self._registered.register_state(name, state, per=per)

    def save_checkpoint(
        self, url: str, step: int | None, *, request: CheckpointRequest, tmpdir: str | None, in_background: bool
    ) -> NoReturn:
        raise self._not_trained("checkpoint")

    def load_checkpoint(self, url: str, step: int) -> NoReturn:
        raise missing_optimizer("load_checkpoint")

    def resume(self, *, allow_fresh_start: bool) -> NoReturn:
        raise missing_optimizer("resume")

    def _not_trained(self, caller: str) -> RuntimeError:
        return RuntimeError(
            f"{caller}() has no trained model here: this process {self.activity} the model and ends at "
            f"set_optimizer(). Call {caller}() after set_optimizer()"
        )


def apply_seed(seed: int, step: int) -> int:
    """The seed of what `Varuna.apply` draws after `step`."""
    return derived_seed(seed, f"apply after step {step}")


def missing_optimizer(caller: str) -> RuntimeError:
    return RuntimeError(f"{caller}() needs the optimizer: call set_optimizer(optimizer) before")


def report_ready(worker: WorkerProcess, step: int, sources: StateSources) -> None:
    """Reports to the agent that the script has prepared everything and begins after `step`."""
    worker.phases.end_phase("script")
    worker.link.report_ready(step, worker.phases.durations_s, sources)
