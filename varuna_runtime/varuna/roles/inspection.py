"""`varuna inspect`: instead of training, the script ends at `set_optimizer` with a report on the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from varuna.calibration.optimizer_costs import OptimizerSetup
from varuna.calibration.profile import calibrate
from varuna.inspection.document import optimizer_document, sections_document, times_document
from varuna.inspection.report import write_report
from varuna.optim.optimizers import left_out
from varuna.optim.split_check import check_optimizer
from varuna.roles.role import ReportRole
from varuna.roles.wrapped_model import WrappedModel
from varuna_planner.profile.document import Profile

__all__ = ["InspectionRole"]

_MEASURE = "measure"


class InspectionRole(ReportRole):
    """Writes a report without the optimizer at once, for scripts that set none, and a whole one at `set_optimizer`."""

    activity = "inspects"

    def __init__(self, wrapped: WrappedModel, seed: int) -> None:
        super().__init__(wrapped, seed)
        self._environment = wrapped.worker.environment
        self._document = {"model": type(wrapped.model).__name__, **sections_document(wrapped.model_map)}
        if self._environment.report_times not in ("", _MEASURE):
            self._document["times"] = self._load_times(Path(self._environment.report_times))
        write_report(self._environment, self._document)

    def make_report(self, optimizers: Sequence[Optimizer]) -> None:
        """Adds what the optimizers do, and measured times if the user wants them."""
        self._document["optimizer"] = optimizer_document(
            [type(optimizer).__name__ for optimizer in optimizers],
            [finding for optimizer in optimizers for finding in check_optimizer(optimizer)],
            left_out(optimizers, self.parameters),
        )
        if self._environment.report_times == _MEASURE:
            self._document["times"] = self._measure_times(optimizers)
        write_report(self._environment, self._document)

    def _measure_times(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        micro_batch = self._environment.plan.micro_batch
        profile = calibrate(
            self.wrapped.calibration_subject(),
            OptimizerSetup(optimizers),
            global_batch=micro_batch,
            micro_batches=[micro_batch],
        )
        assert profile is not None, "one process is rank 0"
        return times_document(profile, micro_batch)

    def _load_times(self, path: Path) -> dict[str, Any]:
        """Raises ValueError when the file is no profile of a model with these sections."""
        profile = Profile.from_json(path.read_text())
        misfit = profile.describe_misfit([section.name for section in self.wrapped.model_map.sections])
        if misfit is not None:
            raise ValueError(f"{path}: {misfit}; give the profile of this model")
        return times_document(profile, self._environment.plan.micro_batch)
