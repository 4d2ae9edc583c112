"""Log lines in the form of NVIDIA's DLLogger, which the recipe's own tools read."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any


class RunLog:
    """Prints `DLL <time> - Training Epoch: 0 Training Iteration: 1  step_loss : …`, and adds it to a file as JSON.

    Every worker prints, because Varuna keeps their outputs apart; only one worker writes the file (`summary` is None on
    the others). It appends, so that a job continues the file after a restart.
    """

    def __init__(self, summary: Path | None) -> None:
        self._began = time.monotonic()
        self._summary = summary
        if summary is not None:
            summary.parent.mkdir(parents=True, exist_ok=True)

    def parameter(self, name: str, value: Any) -> None:
        """Log a value that is fixed for the run."""
        self._write("PARAMETER", {name: value}, f"PARAMETER {name} : {value} ")

    def step(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        text = "".join(f" {name} : {value} " for name, value in figures.items())
        self._write([epoch, step], figures, f"Training Epoch: {epoch} Training Iteration: {step} {text}")

    def end(self, figures: dict[str, float]) -> None:
        """Log the figures after the last step."""
        self._write([], figures, "".join(f" {name} : {value} " for name, value in figures.items()))

    def _write(self, step: Any, data: dict[str, Any], text: str) -> None:
        now = datetime.now()
        sys.stdout.write(f"DLL {now} - {text}\n")
        sys.stdout.flush()
        if self._summary is None:
            return
        line = {
            "timestamp": str(now.timestamp()),
            "datetime": str(now),
            "elapsedtime": str(time.monotonic() - self._began),
            "type": "LOG",
            "step": step,
            "data": data,
        }
        with self._summary.open("a") as file:
            file.write(f"DLLL {json.dumps(line)}\n")
