"""TensorBoard's curves of a job, on request: `VARUNA_TENSORBOARD` names the folder.

Rank 0 writes a file of its own in every generation. The first event in it makes TensorBoard drop what an earlier
generation wrote about the same steps, so that each step appears once even if it was repeated.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog
from torch.optim import Optimizer

from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = ["TensorBoardWriter"]

_VARIABLE = "VARUNA_TENSORBOARD"
_MOST_EARLY = 1000

_log = structlog.get_logger("varuna")


class TensorBoardWriter:
    """Writes the curves. Imports and writes nothing without a folder, on ranks other than 0, and in a calibration."""

    def __init__(self, environment: WorkerEnvironment, environ: Mapping[str, str]) -> None:
        """Raises ValueError on rank 0 when the folder is a URL, or TensorBoard is not installed."""
        self._wanted_folder = environ.get(_VARIABLE, "")
        self._folder = ""
        self._writer: Any = None
        self._early_values: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=_MOST_EARLY)
        """Logged before the first step of this process in its generation, which decides from where the file replaces
        older ones."""
        self.follow_generation(environment)

    def follow_generation(self, environment: WorkerEnvironment) -> None:
        """From now on this process writes as this rank, into a file of its own. Raises as the constructor."""
        if self._writer is not None:
            with suppress(OSError):  # every step is written
                self._writer.close()
            self._writer = None
        self._folder = self._wanted_folder if environment.rank == 0 else ""
        if not self._folder:
            self._early_values.clear()
            return
        if "://" in self._folder:
            raise ValueError(f"{_VARIABLE}={self._folder}: expected a folder, such as one of a disk that all VMs share")
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                f"{_VARIABLE}={self._folder}: TensorBoard is not installed in this job's Python: "
                "pip install 'varuna-spot[tensorboard]' (in the job's setup), or leave the variable out"
            )
        if environment.mode is Mode.CALIBRATE:
            self._folder = ""

    def write_step(
        self, step: int, loss: float, step_s: float, *, examples: int, optimizers: Sequence[Optimizer]
    ) -> None:
        """Writes one step, at once. A folder that cannot be written causes one warning and does not stop training.

        `step` counts from 1; `loss` is the mean over the batch.
        """
        if self._folder:
            values = {
                "loss": loss,
                "step_s": step_s,
                "examples_per_s": examples / step_s,
                **_learning_rates(optimizers),
            }
            self._write(step, {f"train/{name}": value for name, value in values.items()})

    def write_values(self, step: int, values: Mapping[str, float]) -> None:
        """Writes what the script has logged at a step, by name. Before the first step it waits for that."""
        if not self._folder:
            return
        named = {f"script/{name}": value for name, value in values.items()}
        if self._writer is None:
            self._early_values.append((step, named))
        else:
            self._write(step, named)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(self._folder, purge_step=step)
                while self._early_values:
                    early_step, early = self._early_values.popleft()
                    self._write(early_step, early)
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # this process may have to leave at any time, and the next one goes on after it
        except OSError as error:
            _log.warning("no more curves for TensorBoard", folder=self._folder, error=str(error))
            self._folder = ""


def _learning_rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Learning rates by name: one if all groups of parameters have the same, else one for each group."""
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    if len(set(rates)) == 1:
        return {"learning_rate": rates[0]}
    return {f"learning_rate/{index}": rate for index, rate in enumerate(rates)}
