"""The file that `varuna inspect` reads: the findings on a model and its optimizers, or why it was refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna.inspection.text import render_document
from varuna_proto.environment import WorkerEnvironment

__all__ = ["write_refusal", "write_report"]


def write_report(environment: WorkerEnvironment, document: Mapping[str, Any]) -> None:
    """Writes the document of a model, with its text."""
    _write(environment, document, render_document(document))


def write_refusal(environment: WorkerEnvironment, error: Exception) -> None:
    """Writes why a model cannot be trained as it stands."""
    _write(environment, {"refused": str(error)}, str(error))


def _write(environment: WorkerEnvironment, document: Mapping[str, Any], text: str) -> None:
    Path(environment.report_path).write_text(json.dumps({**document, "text": text}))
