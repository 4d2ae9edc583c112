"""Checkpoints: written per section behind training's back, complete or not there, loaded in any P×D. No pickle."""

from varuna.checkpoint.cadence import Cadence, next_save_due
from varuna.checkpoint.errors import CheckpointError, MismatchError, StoreError
from varuna.checkpoint.loading import (
    Loaded,
    last_generation,
    load,
    newest_complete,
    read_manifest,
    read_parameters,
)
from varuna.checkpoint.local import on_one_disk
from varuna.checkpoint.manifest import Cursor, Per
from varuna.checkpoint.pruning import Asked
from varuna.checkpoint.resuming import resume
from varuna.checkpoint.saving import Checkpointer, SaveOutcome
from varuna.checkpoint.state import Place, TrainingState

__all__ = [
    "Asked",
    "Cadence",
    "CheckpointError",
    "Checkpointer",
    "Cursor",
    "Loaded",
    "MismatchError",
    "Per",
    "Place",
    "SaveOutcome",
    "StoreError",
    "TrainingState",
    "last_generation",
    "load",
    "newest_complete",
    "next_save_due",
    "on_one_disk",
    "read_manifest",
    "read_parameters",
    "resume",
]
