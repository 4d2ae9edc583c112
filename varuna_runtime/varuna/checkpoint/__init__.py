"""Checkpoints: written per section in the background, complete or absent, loaded in any P×D. No pickle."""

from varuna.checkpoint.errors import CheckpointError, MismatchError, StoreError
from varuna.checkpoint.format.manifest import SampleCursor, StateScope
from varuna.checkpoint.loading.complete_checkpoints import last_written_generation, newest_complete, read_manifest
from varuna.checkpoint.loading.loader import LoadedCheckpoint, load_checkpoint, read_parameters
from varuna.checkpoint.loading.resuming import resume_checkpoint
from varuna.checkpoint.saving.cadence import decide_save
from varuna.checkpoint.saving.pruning import CheckpointRequest
from varuna.checkpoint.saving.writer import CheckpointWriter, SaveOutcome
from varuna.checkpoint.state.rank_state import ShapePosition, TrainingState
from varuna.checkpoint.storage.local import on_one_disk

__all__ = [
    "CheckpointError",
    "CheckpointRequest",
    "CheckpointWriter",
    "LoadedCheckpoint",
    "MismatchError",
    "SampleCursor",
    "SaveOutcome",
    "ShapePosition",
    "StateScope",
    "StoreError",
    "TrainingState",
    "decide_save",
    "last_written_generation",
    "load_checkpoint",
    "newest_complete",
    "on_one_disk",
    "read_manifest",
    "read_parameters",
    "resume_checkpoint",
]
