"""`varuna inspect`: instead of training, the script ends at `set_optimizer` with a report of what was found."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from varuna.calibration.measuring import calibrate
from varuna.describe import optimizer_document, sections_document, text_of, times_document
from varuna.optimizer_check import check_optimizer
from varuna.optimizers import left_out
from varuna.partition import ModelMap
from varuna.precision import Precision
from varuna_planner.profile import Profile
from varuna_proto.environment import WorkerEnvironment

__all__ = ["Inspecting", "report_refusal"]

_MEASURE = "measure"


@dataclass(frozen=True)
class Inspecting:
    """What is looked at; the report without the optimizer is written at once, for scripts that set none."""

    environment: WorkerEnvironment
    model: nn.Module
    model_map: ModelMap
    get_batch: Callable[[int], dict[str, Any]]
    device: torch.device
    precision: Precision
    _document: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        document = {"model": type(self.model).__name__, **sections_document(self.model_map)}
        if self.environment.report_times not in ("", _MEASURE):
            document["times"] = self._times_of_profile(Path(self.environment.report_times))
        object.__setattr__(self, "_document", document)
        _write(self.environment, document)

    def run(self, optimizers: Sequence[Optimizer]) -> NoReturn:
        """Adds what the optimizers do, and what is measured; ends the script (SystemExit with code 0)."""
        self._document["optimizer"] = optimizer_document(
            [type(optimizer).__name__ for optimizer in optimizers],
            [finding for optimizer in optimizers for finding in check_optimizer(optimizer)],
            left_out(optimizers, dict(self.model.named_parameters())),
        )
        if self.environment.report_times == _MEASURE:
            profile = calibrate(
                self.model,
                self.model_map,
                self.get_batch,
                optimizer=optimizers,
                device=self.device,
                precision=self.precision,
                global_batch=self.environment.micro_batch,
                micro_batches=[self.environment.micro_batch],
            )
            assert profile is not None, "one process is rank 0"
            self._document["times"] = times_document(profile, self.environment.micro_batch)
        _write(self.environment, self._document)
        raise SystemExit(0)

    def _times_of_profile(self, path: Path) -> dict[str, Any]:
        """Raises ValueError when the file is no profile of a model with these sections."""
        profile = Profile.from_json(path.read_text())
        misfit = profile.misfit([section.name for section in self.model_map.sections])
        if misfit is not None:
            raise ValueError(f"{path}: {misfit}; give the profile of this model")
        return times_document(profile, self.environment.micro_batch)


def report_refusal(environment: WorkerEnvironment, error: Exception) -> None:
    """The report of a model that cannot be trained as it stands."""
    _write(environment, {"refused": str(error)})


def _write(environment: WorkerEnvironment, document: dict[str, Any]) -> None:
    text = str(document["refused"]) if "refused" in document else text_of(document)
    Path(environment.report_path).write_text(json.dumps({**document, "text": text}))
