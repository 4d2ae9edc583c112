"""Where the repository's folders are, for tests at any depth."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DATA", "ROOT", "TRAINING_SCRIPTS", "WORKERS"]

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
TRAINING_SCRIPTS = ROOT / "tests" / "support" / "training"
"""Scripts that tests start as ranks, beside the modules that these import."""
WORKERS = ROOT / "tests" / "support" / "managers"
"""Programs that tests start as a job's workers, or as a manager."""
